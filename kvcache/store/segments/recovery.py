"""What the stored bytes themselves say: segments in a directory tree, records in a segment.

A sealed segment tells through its sidecar. Any other is read from its headers up to the last valid record: behind a
torn record the scan goes on at the next 4 KiB, since a group's records may reach the disk in any order and the ones
behind a hole may have been promised. A header counts only if it names this segment and this offset (record.py).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.kvcache.entries import payload_digest
from headrace.kvcache.store.files import FileLayer, StoreFile
from headrace.kvcache.store.segments.buffers import page_aligned
from headrace.kvcache.store.segments.names import ROOT, SIDECAR_SUFFIX, SUFFIX, Bucket, SegmentName
from headrace.kvcache.store.segments.open_segment import read_whole
from headrace.kvcache.store.segments.record import (
    ALIGN,
    HEADER_BYTES,
    MAGIC,
    Header,
    aligned,
    read_header,
    record_bytes,
    segment_id,
)
from headrace.kvcache.store.segments.sidecar import decode_sidecar

_CHUNK = 4 << 20
_MAX_RECORD = 1 << 32
_GAP = 64 << 20
"""More than the writes of one segment that can be on their way together, hence than a hole between promised records."""


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment file in the tree."""

    name: SegmentName
    sidecar: bool
    """A sidecar lies beside it."""


def find_buckets(files: FileLayer) -> Iterator[Bucket]:
    """Every bucket directory."""
    for namespace in files.list(ROOT):
        for retention in files.list(f"{ROOT}/{namespace}"):
            for end in files.list(f"{ROOT}/{namespace}/{retention}"):
                bucket = Bucket.parse(f"{namespace}/{retention}/{end}")
                if bucket is not None:
                    yield bucket


def find_segments(files: FileLayer, bucket: Bucket | None = None) -> Iterator[FoundSegment]:
    """Every segment of a bucket, or of all."""
    for each in (bucket,) if bucket is not None else find_buckets(files):
        names = set(files.list(each.directory))
        for name in sorted(names):
            found = SegmentName.parse(f"{each.directory}/{name}")
            if found is not None:
                yield FoundSegment(found, name[: -len(SUFFIX)] + SIDECAR_SUFFIX in names)


def read_sidecar(files: FileLayer, name: SegmentName) -> tuple[Header, ...] | None:
    """The records of a sealed segment, or None if its sidecar is missing or damaged."""
    try:
        file = files.open(name.sidecar, direct=False)
    except FileNotFoundError:
        return None
    try:
        data = read_whole(file)
    finally:
        file.close()
    return decode_sidecar(data, segment_id(name.path), name.bucket.namespace)


def read_records(files: FileLayer, found: FoundSegment, *, direct: bool) -> tuple[Header, ...]:
    """Every valid record of a segment, by offset: from the sidecar, or verified one by one. OSError if the segment
    cannot be read; FileNotFoundError if it is gone."""
    if found.sidecar:
        headers = read_sidecar(files, found.name)
        if headers is not None:
            return headers
    file = files.open(found.name.path, direct=direct)
    try:
        return tuple(header for header, good in scan_file(file, segment_id(found.name.path)) if good)
    finally:
        file.close()


def scan_file(file: StoreFile, identity: bytes) -> Iterator[tuple[Header, bool]]:
    """Every record header that belongs where it stands, and whether its payload has its digest."""
    window = _Window(file)
    position = 0
    while (at := window.find(position)) is not None:
        header = read_header(window.page(at))
        if header is None or header.offset != at or header.segment_id != identity:
            position = at + ALIGN
            continue
        yield header, window.has_payload(header)
        position = header.end


class _Window:
    """A piece of a file in memory, moved forward."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file
        self._size = max(file.size(), _GAP)
        """Where to stop looking: behind the size, which a mount may remember too small, and behind any bytes seen."""
        self._mapping = page_aligned(_CHUNK)
        self._view = memoryview(self._mapping)
        self._start = 0
        self._end = 0

    def find(self, position: int) -> int | None:
        """The next multiple of 4 KiB at or behind `position` where a header may stand."""
        while True:
            if not self._start <= position < self._end:
                hole = self._load(position)
                if position >= self._end:
                    # Nothing there, and perhaps records behind it: writes of one segment overtake each other, so what
                    # follows a write that failed may have been promised.
                    position += aligned(hole)
                    if position >= self._size:
                        return None
                    continue
                self._size = max(self._size, self._end + _GAP)
            at = self._mapping.find(MAGIC, position - self._start, self._end - self._start)
            if at < 0:
                position = self._end
            elif at % ALIGN or at + HEADER_BYTES > self._end - self._start:
                position = self._start + aligned(at + 1)
            else:
                return self._start + at

    def page(self, at: int) -> memoryview:
        return self._view[at - self._start : at - self._start + HEADER_BYTES]

    def has_payload(self, header: Header) -> bool:
        """Whether the payload behind this header is the one it names."""
        size = record_bytes(header.info.length)
        if header.end > self._end:
            if size > _MAX_RECORD:
                return False
            if size <= _CHUNK:
                self._load(header.offset)
            else:
                return self._has_large_payload(header, size)
        start = header.offset - self._start + HEADER_BYTES
        if start + header.info.length > self._end - self._start:
            return False
        return payload_digest(self._view[start : start + header.info.length]) == header.info.digest

    def _has_large_payload(self, header: Header, size: int) -> bool:
        record = memoryview(page_aligned(size))
        count, _ = self._read(record, header.offset)
        end = HEADER_BYTES + header.info.length
        return count >= end and payload_digest(record[HEADER_BYTES:end]) == header.info.digest

    def _load(self, position: int) -> int:
        """Fill the window from there on; short at the end of the file or before a hole. Returns how many bytes from its
        end on are known to be missing."""
        self._start = self._end = position
        while self._end - self._start < _CHUNK:
            count, asked = self._read(self._view[self._end - self._start :], self._end)
            if count <= 0:
                return asked
            self._end += count
            if count % ALIGN:
                # The end of the file: direct IO cannot go on from an odd place.
                break
        return 0

    def _read(self, view: memoryview, offset: int) -> tuple[int, int]:
        """preadv up to the first hole, where a file system (3FS) refuses a read that has one in it: bytes read, and
        asked."""
        while True:
            try:
                return self._file.preadv([view], offset), len(view)
            except OSError as error:
                if error.errno != errno.ENODATA:
                    raise
                if len(view) <= ALIGN:
                    return 0, len(view)
                view = view[: aligned(len(view) // 2)]
