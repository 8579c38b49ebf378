"""Clients of bench.overload, and what its processes' memory does meanwhile."""
