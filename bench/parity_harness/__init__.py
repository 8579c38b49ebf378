"""What bench.parity compares and how: cases, the three ways they are answered, and the comparison of the answers.

Knows the engine's and the client's public faces only; nothing in the system may import it.
"""
