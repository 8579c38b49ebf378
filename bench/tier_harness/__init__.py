"""Servers of the cache tier as processes on this machine, for benchmarks and fault tests: real ones, on loopback."""
