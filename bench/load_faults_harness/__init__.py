"""What bench.load_faults is made of: the router's objects under a simulated clock, and a real cluster whose processes
are stopped, killed, and made to lie."""
