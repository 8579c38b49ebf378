"""How one entry lies in SeaweedFS: collections, file ids, and what the index says of them.

A namespace has a collection of its own (dropping the one drops the other), a class its time to live, and SeaweedFS
keeps volumes apart by both. A record is what the segment engine writes, without padding at its end: header of 4 KiB,
payload. Its header's offset is the needle's id and its segment id names the collection, so that a needle of another
place is never taken for it.

Index row: group = `v1/<namespace hex>/<class>/<expiry bucket>/<volume>`, place = needle id · 2³² + cookie.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from headrace.kvcache.entries import EntryInfo, Loaded, Miss, payload_digest
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.store.segments.names import ROOT, Bucket, bucket_name
from headrace.kvcache.store.segments.record import HEADER_BYTES, Header, read_header, write_header

_COOKIE_BITS = 32
_COOKIE_MASK = (1 << _COOKIE_BITS) - 1


@dataclass(frozen=True, slots=True, order=True)
class Needle:
    """Where one record lies: a file id."""

    volume: int
    number: int
    cookie: int

    @property
    def path(self) -> str:
        """As volume servers are asked for it."""
        return f"/{self.volume},{self.number:x}{self.cookie:08x}"

    @property
    def place(self) -> int:
        return self.number << _COOKIE_BITS | self.cookie


def collection_of(prefix: str, namespace: bytes) -> str:
    """The collection of a namespace: 64 bits of it, since names become parts of file names."""
    return f"{prefix}_{namespace[:8].hex()}"


def log_collection(prefix: str) -> str:
    """The collection that keeps what was erased."""
    return f"{prefix}_log"


def group_of(bucket: Bucket, volume: int) -> str:
    """The group of index rows of one bucket in one volume."""
    return f"{bucket.directory}/{volume}"


def needle_of(row: IndexRow) -> Needle | None:
    """Where the record of an index row lies, or None if the row is not one of this engine."""
    volume = row.group.rpartition("/")[2]
    if not volume.isdecimal() or bucket_of(row.group) is None:
        return None
    return Needle(int(volume), row.place >> _COOKIE_BITS, row.place & _COOKIE_MASK)


def bucket_of(group: str) -> Bucket | None:
    """The bucket of a group, or None if it is not one of this engine."""
    return Bucket.parse(bucket_name(group)) if group.startswith(f"{ROOT}/") else None


def header_for(info: EntryInfo, needle: Needle, collection: str, sequence: int, expires_at: int) -> Header:
    """The header of a record that is written to `needle`."""
    return Header(info, sequence, needle.number, expires_at, _identity(collection))


def row_for(header: Header, needle: Needle) -> IndexRow:
    """What the index keeps of a record."""
    info = header.info
    bucket = Bucket(info.namespace, info.retention, header.expires_at)
    return IndexRow(
        key=info.key,
        group=group_of(bucket, needle.volume),
        place=needle.place,
        length=info.length,
        kind=info.kind,
        retention=info.retention,
        tokens=info.tokens,
        expires_at=header.expires_at,
        tenant_tag=info.tenant_tag,
    )


def belongs(header: Header, collection: str, needle: int) -> bool:
    """Whether a header was written for that needle of that collection."""
    return header.offset == needle and header.segment_id == _identity(collection)


def new_record(payload: bytes | memoryview) -> bytearray:
    """A record whose header is still to be written (fill_header)."""
    return bytearray(HEADER_BYTES) + payload


def fill_header(record: bytearray, header: Header) -> None:
    with memoryview(record) as view:
        write_header(header, view[:HEADER_BYTES])


def verified(body: bytes, row: IndexRow, needle: Needle, prefix: str) -> Loaded | Miss:
    """The payload of a whole record if everything in it is what `row` promises, else what is wrong with it (L3)."""
    if len(body) < HEADER_BYTES:
        return Miss.SHORT
    view = memoryview(body)
    header = read_header(view[:HEADER_BYTES])
    if header is None or header.info.key != row.key or header.info.length != row.length:
        return Miss.HEADER
    if not belongs(header, collection_of(prefix, header.info.namespace), needle.number):
        return Miss.HEADER
    if len(body) != HEADER_BYTES + header.info.length:
        return Miss.SHORT
    payload = view[HEADER_BYTES:]
    if payload_digest(payload) != header.info.digest:
        return Miss.DIGEST
    return Loaded(header.info, payload, _nothing)


def _nothing() -> None:
    """Releasing a payload in memory of its own."""


def _identity(collection: str) -> bytes:
    return hashlib.blake2b(f"seaweedfs/{collection}".encode(), digest_size=16).digest()
