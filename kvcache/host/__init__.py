"""The host tier (G2): a worker's entries in host memory, beside and beyond its device pool. Text: README.md.

Knows bytes, keys, entries and the transfer engine's interface; nothing of torch, the engine, gRPC or asyncio. It dies
with its process; what must survive lies in the store.
"""
