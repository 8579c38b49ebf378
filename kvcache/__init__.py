"""KV memory of a worker: layout, keys, pool, prefix reuse, landing region and transfer.

Knows bytes and keys; does not know models, requests' text or services.
"""
