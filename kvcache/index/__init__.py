"""The index of a store: key → where its record lies. A hint that is rebuilt from the records; never a truth (L3).

SQLite embedded in one machine, Redis shared by many, a dict as their plain twin; one contract (base.py), one suite.
"""
