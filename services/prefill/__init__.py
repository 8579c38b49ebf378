"""The prefill process: prompts to KV, pushed to the decode replica that the router chose.

Read service.py (the call), run.py (one run, top to bottom), target.py (its pushes), commit.py (the hand-over). It knows
decode by its contract alone, never by its code.
"""
