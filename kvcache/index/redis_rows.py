"""How a row lies in Redis: field = first 16 bytes of the key, value = everything else, packed.

A group's number is a digest of its name, so that no process's memory of numbers can become wrong when the server loses
its contents. 64 bits: among a million groups two meet with probability 3 · 10⁻⁸, and then read each other's file, where
verification misses.
"""

from __future__ import annotations

import struct

import xxhash

from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.index.what import WHAT, pack_what

FIELD_BYTES = 16
_FIXED = struct.Struct("<8s16s16sIIIB")
"""gid, rest of the key, tenant tag, length, tokens, expires_at, kind and retention; the place follows."""


def gid_of(group: str) -> bytes:
    return xxhash.xxh3_64_digest(group.encode())


def pack(row: IndexRow, gid: bytes) -> bytes:
    rest = row.key[FIELD_BYTES:]
    fixed = _FIXED.pack(gid, rest, row.tenant_tag, row.length, row.tokens, row.expires_at, pack_what(row))
    return fixed + _place(row.place)


def wanted(row: IndexRow, gid: bytes) -> bytes:
    """What a row must still say to be removed (redis_scripts.REMOVE)."""
    return gid + row.key[FIELD_BYTES:] + _place(row.place)


def unpack(field: bytes, packed: bytes, group: str) -> IndexRow:
    _, rest, tag, length, tokens, expires_at, what = _FIXED.unpack_from(packed)
    kind, retention = WHAT[what]
    place = int.from_bytes(packed[_FIXED.size :], "little")
    return IndexRow(field + rest, group, place, length, kind, retention, tokens, expires_at, tag)


def _place(place: int) -> bytes:
    return place.to_bytes((place.bit_length() + 7) // 8, "little")
