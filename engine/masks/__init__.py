"""Structured output: languages compiled apart from the engine, and the mask of each token that a choice may take next.

Knows xgrammar, which nothing else does; no scheduler, no sampling, no protobuf.
"""
