"""The record: a header of 4 KiB, then the payload padded to 4 KiB (spec/kv_tier.md, Store on POSIX).

Header, little endian: magic, version, flags, kind, class, tokens, length, sequence, offset, expires_at, key, parent,
namespace, digest, tenant tag, segment id; zeros; CRC-32 of all that in the last 4 bytes. Offset and segment id make a
header say where it belongs: bytes of another place, of an older file, or of a payload that looks like a header are
never taken for a record, so that a scan can find the next record behind a torn one by looking at every 4 KiB.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import NamedTuple

from headrace.kvcache.entries import EntryFieldError, EntryInfo, EntryKind, RetentionClass

ALIGN = 4096
HEADER_BYTES = ALIGN
MAGIC = b"HRSEGREC"
VERSION = 1

_FIELDS = struct.Struct("<8sHHBBHIQQQQ32s32s32s16s16s16s")
FIELD_BYTES = _FIELDS.size
"""Of a header page; zeros follow them up to the checksum."""
_CRC = struct.Struct("<I")
_CRC_AT = HEADER_BYTES - _CRC.size
_ZEROS = bytes(_CRC_AT - _FIELDS.size)
_FLIP = 0xFFFF_FFFF
_KINDS = {int(kind): kind for kind in EntryKind}
_CLASSES = {int(retention): retention for retention in RetentionClass}


def _behind_zeros() -> tuple[tuple[int, ...], ...]:
    """What appending `_ZEROS` does to the state of a CRC-32, which is linear over GF(2): by byte of the state."""
    bits = [zlib.crc32(_ZEROS, 1 << bit ^ _FLIP) ^ _FLIP for bit in range(32)]
    tables = []
    for first in range(0, 32, 8):
        table = [0] * 256
        for value in range(1, 256):
            low = value & -value
            table[value] = table[value ^ low] ^ bits[first + low.bit_length() - 1]
        tables.append(tuple(table))
    return tuple(tables)


_LOW, _SECOND, _THIRD, _HIGH = _behind_zeros()


def header_crc(fields: memoryview) -> int:
    """CRC-32 of the fields and the zeros behind them up to the checksum, without walking the zeros: 4 µs less of a
    header (measured), and every block that is written or read has one."""
    state = zlib.crc32(fields) ^ _FLIP
    behind = _LOW[state & 255] ^ _SECOND[state >> 8 & 255] ^ _THIRD[state >> 16 & 255] ^ _HIGH[state >> 24]
    return behind ^ _FLIP


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of 4 KiB."""
    return (size + ALIGN - 1) & -ALIGN


def record_bytes(length: int) -> int:
    """Bytes of a whole record whose payload has `length` bytes."""
    return HEADER_BYTES + aligned(length)


def segment_id(path: str) -> bytes:
    """16 bytes that tie a record to its segment: BLAKE2b of the segment's path, which is never used twice."""
    return hashlib.blake2b(path.encode(), digest_size=16).digest()


class Header(NamedTuple):
    """What a header says. A tuple as IndexRow is one."""

    info: EntryInfo
    sequence: int
    """Grows with every record a writer writes; of two copies the later expiry wins, then the higher sequence."""
    offset: int
    expires_at: int
    """Wall clock seconds; 0 never."""
    segment_id: bytes

    @property
    def end(self) -> int:
        """Offset after the record."""
        return self.offset + record_bytes(self.info.length)


def write_fields(header: Header, page: memoryview) -> None:
    """All of a header but its checksum (`stamp_header`); `page` is zero behind the fields."""
    info = header.info
    _FIELDS.pack_into(
        page,
        0,
        MAGIC,
        VERSION,
        0,
        info.kind,
        info.retention,
        0,
        info.tokens,
        info.length,
        header.sequence,
        header.offset,
        header.expires_at,
        info.key,
        info.parent,
        info.namespace,
        info.digest,
        info.tenant_tag,
        header.segment_id,
    )


def stamp_header(page: memoryview) -> None:
    """The checksum of a header whose fields are in `page`."""
    _CRC.pack_into(page, _CRC_AT, header_crc(page[:FIELD_BYTES]))


def write_header(header: Header, page: memoryview) -> None:
    """Fill the first 4 KiB of a record; `page` has 4,096 bytes, zero behind the fields."""
    write_fields(header, page)
    stamp_header(page)


def read_header(page: memoryview) -> Header | None:
    """The header in the first 4 KiB of `page`, or None if there is no whole one of this version."""
    if (
        len(page) < HEADER_BYTES
        or page[:8] != MAGIC
        or _CRC.unpack_from(page, _CRC_AT)[0] != header_crc(page[: _FIELDS.size])
        or bytes(page[_FIELDS.size : _CRC_AT]) != _ZEROS
    ):
        return None
    (
        _,
        version,
        _flags,
        kind,
        retention,
        _,
        tokens,
        length,
        sequence,
        offset,
        expires_at,
        key,
        parent,
        namespace,
        digest,
        tenant_tag,
        identity,
    ) = _FIELDS.unpack_from(page)
    if version != VERSION or kind not in _KINDS or retention not in _CLASSES:
        return None
    try:
        info = EntryInfo(
            key=key,
            kind=_KINDS[kind],
            namespace=namespace,
            parent=parent,
            tokens=tokens,
            length=length,
            digest=digest,
            retention=_CLASSES[retention],
            tenant_tag=tenant_tag,
        )
    except EntryFieldError:
        return None
    return Header(info, sequence, offset, expires_at, identity)
