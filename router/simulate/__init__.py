"""The cluster in simulated time, around the very objects that decide in the router service.

Pure like the rest of the router: no real clock, no processes, no sockets; `cli/simulate.py` runs several simulations
side by side. See README.md.
"""
