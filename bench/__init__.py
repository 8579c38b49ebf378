"""Benchmarks: each a program that prints JSON and compares with a limit or a peer in the same run."""
