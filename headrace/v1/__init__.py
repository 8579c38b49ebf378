"""The wire contract, generated from proto/headrace/v1 by `./build.sh proto`.

Only these types cross a process border.
"""
