"""What bench.overhead measures with: a closed loop of requests, the offline engine, a pinned cluster, a hand-over by
hand, and where processes spend their CPU time.

Times are perf_counter seconds of the bench's own process.
"""
