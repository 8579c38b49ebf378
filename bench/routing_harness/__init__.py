"""The timing-free replay R of traces (spec/balancers.md) around the balancers and the index of the router.

plain.py   an index by brute force, and the cache of one worker
replay.py  one replay and what it measured
policies.py the policies of the table
"""
