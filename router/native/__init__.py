"""The hot part of a decision in C++: the prompt in the prefix index, the costs of all ranks, the best pair.

What it computes is said in Python (`index/match.py`, `balancers/prefill.py`, `balancers/decode.py`), which serves where
there is no compiler and which property tests compare this with. See README.md.
"""
