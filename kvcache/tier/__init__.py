"""The cache tier in the way of a request: what is loaded before a prompt is computed, what is kept of it afterwards.

plan.py     which prefix is worth fetching
load.py     fetch it, prefix first, against a deadline
loader.py   what the loads of a worker share
writer.py   copy what the engine offers to the host tier and the store

They work between a device pool and TierSources; they know no engine, no RPC and no event loop, and what they call back
runs on their threads.
"""
