"""The two pieces of SeaweedFS's files that a scan reads: a volume's index file, and the first bytes of a needle.

All integers are big endian. Index entry: needle id (8 bytes), offset in units of 8 bytes (4 bytes, or 5 in builds for
large disks, whose version begins with 8000GB; the fifth holds the high bits), size (4, signed). The file is a log: the
last entry of a needle holds, and a size below zero or an offset of zero says that it was deleted. Needle: cookie (4),
id (8), size (4), length of the data (4), data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.kvcache.store.base import StoreError

_UNIT = 8
_NEEDLE = struct.Struct(">IQII")
_LARGE_DISK = "8000GB"
_SMALL_DISK = "30GB"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Where a needle lies in its volume."""

    number: int
    offset: int
    """Bytes; 0 if deleted."""
    size: int
    """Of the needle's body; −1 if deleted."""

    @property
    def deleted(self) -> bool:
        return self.size < 0


@dataclass(frozen=True, slots=True)
class NeedleHead:
    """One live needle."""

    number: int
    cookie: int
    head: bytes
    """Its data's first bytes, as many as were asked for or as it has."""


def offset_bytes(version: str) -> int:
    """How wide offsets are in index files of servers of this version."""
    if version.startswith(_LARGE_DISK):
        return 5
    if version.startswith(_SMALL_DISK):
        return 4
    raise StoreError(
        f"SeaweedFS {version!r}: how it writes index files is unknown, so that its volumes cannot be scanned"
    )


def parse_index(data: bytes, width: int) -> dict[int, IndexEntry]:
    """Needle id → its last entry. An entry that was cut off at the end is left out: it is being written."""
    layout = struct.Struct(">QIi" if width == 4 else ">QIBi")
    whole = len(data) - len(data) % layout.size
    entries = {}
    for fields in layout.iter_unpack(data[:whole]):
        number, low, *high, size = fields
        offset = (low | (high[0] << 32 if high else 0)) * _UNIT
        gone = size < 0 or offset == 0
        entries[number] = IndexEntry(number, 0 if gone else offset, -1 if gone else size)
    return entries


def blob_size(entry: IndexEntry, head_bytes: int) -> int:
    """The size to ask for so that a read of a needle covers its first `head_bytes` of data."""
    return min(entry.size, 4 + head_bytes)


def parse_needle(blob: bytes, number: int, head_bytes: int) -> Iterator[NeedleHead]:
    """The needle whose first bytes these are; nothing if they are those of another one (the volume was compacted)."""
    if len(blob) < _NEEDLE.size:
        return
    cookie, found, _, length = _NEEDLE.unpack_from(blob)
    if found == number:
        yield NeedleHead(number, cookie, blob[_NEEDLE.size : _NEEDLE.size + min(length, head_bytes)])
