"""The immutable index beside a sealed segment, and the footer at its end.

`.idx`, little endian: magic, version, number of records, end of the data, segment id; per record offset, length,
sequence, expires_at, tokens, kind, class, key, parent, digest, tenant tag; xxh3-128 of all before. The namespace stands
in the path. The footer is one page behind the last record: it says that the segment is whole and what its sidecar was.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from headrace.kvcache.entries import EntryFieldError, EntryInfo, EntryKind, RetentionClass
from headrace.kvcache.store.segments.record import ALIGN, Header

SIDECAR_MAGIC = b"HRSEGIDX"
FOOTER_MAGIC = b"HRSEGEND"
VERSION = 1

_HEAD = struct.Struct("<8sIIQ16s")
_ENTRY = struct.Struct("<QQQQIBBH32s32s16s16s")
_FOOTER = struct.Struct("<8sIIQ16s16s")
_CRC = struct.Struct("<I")
_DIGEST_BYTES = 16


def encode_sidecar(headers: Sequence[Header], segment_id: bytes, data_end: int) -> bytes:
    """The sidecar of a segment with these records, in order of their offsets."""
    out = bytearray(_HEAD.pack(SIDECAR_MAGIC, VERSION, len(headers), data_end, segment_id))
    for header in headers:
        info = header.info
        out += _ENTRY.pack(
            header.offset,
            info.length,
            header.sequence,
            header.expires_at,
            info.tokens,
            info.kind,
            info.retention,
            0,
            info.key,
            info.parent,
            info.digest,
            info.tenant_tag,
        )
    out += xxhash.xxh3_128_digest(out)
    return bytes(out)


def decode_sidecar(data: memoryview, segment_id: bytes, namespace: bytes) -> tuple[Header, ...] | None:
    """The records, or None if the sidecar is not whole or another segment's: the segment's headers tell then."""
    if len(data) < _HEAD.size + _DIGEST_BYTES:
        return None
    magic, version, count, _end, identity = _HEAD.unpack_from(data)
    size = _HEAD.size + count * _ENTRY.size
    if magic != SIDECAR_MAGIC or version != VERSION or identity != segment_id or len(data) != size + _DIGEST_BYTES:
        return None
    if data[size:] != xxhash.xxh3_128_digest(data[:size]):
        return None
    headers = []
    for fields in _ENTRY.iter_unpack(data[_HEAD.size : size]):
        offset, length, sequence, expires_at, tokens, kind, retention, _, key, parent, digest, tenant_tag = fields
        try:
            info = EntryInfo(
                key, EntryKind(kind), namespace, parent, tokens, length, digest, RetentionClass(retention), tenant_tag
            )
        except (EntryFieldError, ValueError):
            return None
        headers.append(Header(info, sequence, offset, expires_at, segment_id))
    return tuple(headers)


@dataclass(frozen=True, slots=True)
class Footer:
    """The last page of a sealed segment."""

    records: int
    data_end: int
    segment_id: bytes
    sidecar_digest: bytes
    """xxh3-128 at the end of the sidecar."""


def write_footer(footer: Footer, page: memoryview) -> None:
    """Fill a page of zeros."""
    _FOOTER.pack_into(
        page, 0, FOOTER_MAGIC, VERSION, footer.records, footer.data_end, footer.segment_id, footer.sidecar_digest
    )
    _CRC.pack_into(page, ALIGN - _CRC.size, zlib.crc32(page[: ALIGN - _CRC.size]))


def read_footer(page: memoryview) -> Footer | None:
    """The footer in a page, or None."""
    if len(page) < ALIGN or page[:8] != FOOTER_MAGIC:
        return None
    if _CRC.unpack_from(page, ALIGN - _CRC.size)[0] != zlib.crc32(page[: ALIGN - _CRC.size]):
        return None
    _, version, records, data_end, identity, digest = _FOOTER.unpack_from(page)
    return Footer(records, data_end, identity, digest) if version == VERSION else None
