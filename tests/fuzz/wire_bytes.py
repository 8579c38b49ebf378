"""Mutations of serialised messages: what no sender of ours would write, and parsers meet all the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

DEEP: Final = 200
"""Levels of nesting: over protobuf's limit of 100."""


def mutate_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Changed bytes, and what was done."""
    kinds: dict[str, Callable[[bytes, random.Random], bytes]] = {
        "flip": _flip,
        "truncate": lambda data, rng: data[: rng.randrange(len(data))] if data else data,
        "insert": _insert,
        "repeat": _repeat,
        "overwrite": _overwrite,
        "noise": lambda data, rng: rng.randbytes(rng.choice((1, 2, 7, 64, 4096))),
        "unknown field": lambda data, rng: data + _field(rng),
        "bad length": lambda data, rng: data + _tag(rng.randrange(1, 22), 2) + b"\xff\xff\xff\xff\x07",
        "deep": lambda data, rng: data + _tag(rng.randrange(1, 22), 3) * DEEP,
        "bad text": lambda data, rng: data + _tag(rng.randrange(1, 22), 2) + b"\x04\xff\xfe\xc0\x80",
    }
    name = rng.choice(tuple(kinds))
    return kinds[name](data, rng), name


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.randbytes(rng.choice((1, 2, 10))) + data[place:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\0" * 64
    start = rng.randrange(len(data))
    piece = data[start : start + rng.choice((1, 8, 64))]
    return data[:start] + piece * rng.choice((2, 10, 500)) + data[start:]


def _overwrite(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\xff"
    start = rng.randrange(len(data))
    piece = rng.choice((b"\xff" * 10, b"\x80" * 11, b"\0" * 8, rng.randbytes(4)))
    return data[:start] + piece + data[start + len(piece) :]


def _field(rng: random.Random) -> bytes:
    """A well-formed field that no message of the contract has, or has with another type."""
    number = rng.choice((rng.randrange(1, 30), 1000, 536_870_911))
    return _tag(number, 2) + bytes([5]) + rng.randbytes(5) if rng.random() < 0.5 else _tag(number, 0) + b"\x7f"


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
