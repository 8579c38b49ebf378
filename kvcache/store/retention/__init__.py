"""Decisions of a store about what lives how long: pure, no IO, no clock, no threads; time is an argument.

classes.py   lives and expiry buckets of the traffic classes
refresh.py   which entries of a used prefix are re-appended, and into which class
heat.py      what was used when, and the order in which entries are given up
ledger.py    how many bytes lie in which segment, and whose
pressure.py  what goes when a store or a tenant is over its quota
sweep.py     when the clock allows a sweep

Engines carry the decisions out (segments/); bench.retention replays the same objects over a trace. POLICIES.md says
what each does, when to pick it, and its parameters. Must not know files, indexes, the engine or requests.
"""
