"""What bench.store measures: the segment engine beside plain preadv / pwritev, files, and LMCache's disk backend."""
