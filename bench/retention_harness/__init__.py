"""Replays a trace of requests against the retention policies of the store: no payloads, no files, a simulated clock.

trace.py   a trace file, stretched and copied with fresh ids
model.py   an in-memory store of segments that runs the policy objects of kvcache/store/retention
peers.py   leaf-first LRU, S3-FIFO and FIFO over single blocks, for comparison
replay.py  one replay and what it measured
plot.py    the figures as a picture (matplotlib, if it is installed)
"""
