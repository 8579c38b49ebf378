"""Row transfer between two processes: a small interface (base) and its NIXL implementation (nixl).

Knows memory, handles and peers' descriptions; knows no protobuf, no RPC and no requests. See README.md beside this
file for the states of a push, the terminal notice and which wire is used where.
"""
