"""The segment store on a mounted 3FS (deepseek-ai/3FS): data through USRBIO rings, names through the mount.

What the segment engine uses is layer.py, a FileLayer; README.md says how the parts fit, how to lay the directory out,
and that no real 3FS cluster has been behind this yet. Must not know segments, records, keys or the index.
"""
