"""The durable tier (G3): engines behind one interface (base.py), each passing tests/kvcache/store/contract.py.

Knows keys, entries and the index; nothing of torch, the engine, gRPC or asyncio.
"""
