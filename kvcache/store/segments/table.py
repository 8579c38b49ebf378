"""What a process knows of the segments of its store: sizes and tenants. A view for decisions; never needed to read.

Filled from the index at the start and at each sweep, kept up by this process's own writes and removals; what
other processes write is seen at the next sweep.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.kvcache.entries import EntryKind
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.keys import Key
from headrace.kvcache.store.segments.names import Bucket, SegmentName
from headrace.kvcache.store.segments.record import record_bytes


@dataclass(frozen=True, slots=True)
class SegmentView:
    """One segment as the policies see it."""

    path: str
    bucket: Bucket
    writer: str
    sealed: bool
    disk_bytes: int
    """Bytes of live and dead records; what unlinking frees, but for preallocation."""
    live_bytes: int
    """Bytes of records that the index points to."""
    live_records: int
    tenant_bytes: Mapping[bytes, int]


class _Segment:
    __slots__ = ("disk_bytes", "live", "name", "sealed", "tenants")

    def __init__(self, name: SegmentName) -> None:
        self.name = name
        self.sealed = False
        self.disk_bytes = 0
        self.live: dict[int, tuple[Key, int]] = {}
        self.tenants: dict[bytes, int] = {}


class SegmentTable:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[str, _Segment] = {}
        self._entries = dict.fromkeys(EntryKind, 0)
        self._payload = 0
        self._tenants: dict[bytes, int] = {}

    def replace(self, rows: Iterable[IndexRow]) -> None:
        """Start again from what the index says."""
        fresh = SegmentTable()
        fresh.add(rows)
        with self._lock:
            for path, segment in fresh._segments.items():
                old = self._segments.get(path)
                if old is not None:
                    segment.sealed = old.sealed
                    segment.disk_bytes = max(segment.disk_bytes, old.disk_bytes)
            self._segments, self._entries = fresh._segments, fresh._entries
            self._payload, self._tenants = fresh._payload, fresh._tenants

    def add(self, rows: Iterable[IndexRow]) -> None:
        """Records that the index now points to."""
        with self._lock:
            for row in rows:
                segment = self._segments.get(row.group)
                if segment is None:
                    name = SegmentName.parse(row.group)
                    if name is None:
                        continue
                    segment = self._segments[row.group] = _Segment(name)
                if row.place in segment.live:
                    continue
                size = record_bytes(row.length)
                segment.live[row.place] = (row.key, size)
                segment.disk_bytes = max(segment.disk_bytes, row.place + size)
                segment.tenants[row.tenant_tag] = segment.tenants.get(row.tenant_tag, 0) + size
                self._tenants[row.tenant_tag] = self._tenants.get(row.tenant_tag, 0) + size
                self._entries[row.kind] += 1
                self._payload += row.length

    def remove(self, rows: Iterable[IndexRow]) -> None:
        """Records that the index points to no more."""
        with self._lock:
            for row in rows:
                segment = self._segments.get(row.group)
                if segment is None or segment.live.pop(row.place, None) is None:
                    continue
                size = record_bytes(row.length)
                _subtract(segment.tenants, row.tenant_tag, size)
                _subtract(self._tenants, row.tenant_tag, size)
                self._entries[row.kind] -= 1
                self._payload -= row.length

    def sealed(self, path: str, disk_bytes: int | None = None) -> None:
        """It has a sidecar; `disk_bytes` of its file, where known."""
        with self._lock:
            segment = self._segments.get(path)
            if segment is not None:
                segment.sealed, segment.disk_bytes = True, disk_bytes or segment.disk_bytes

    def forget(self, path: str) -> None:
        """The file is gone; its rows were removed before."""
        with self._lock:
            self._segments.pop(path, None)

    def tenant_bytes(self, tenant_tag: bytes) -> int:
        with self._lock:
            return self._tenants.get(tenant_tag, 0)

    def tenants(self) -> Mapping[bytes, int]:
        """Record bytes of every tenant."""
        with self._lock:
            return dict(self._tenants)

    def views(self) -> tuple[SegmentView, ...]:
        with self._lock:
            return tuple(
                SegmentView(
                    path,
                    segment.name.bucket,
                    segment.name.writer,
                    segment.sealed,
                    segment.disk_bytes,
                    sum(size for _, size in segment.live.values()),
                    len(segment.live),
                    dict(segment.tenants),
                )
                for path, segment in self._segments.items()
            )

    def totals(self) -> tuple[int, int, int, int, int, int]:
        """Blocks, snapshots, payload bytes, disk bytes, segments, buckets."""
        with self._lock:
            return (
                self._entries[EntryKind.BLOCK],
                self._entries[EntryKind.SNAPSHOT],
                self._payload,
                sum(segment.disk_bytes for segment in self._segments.values()),
                len(self._segments),
                len({segment.name.bucket for segment in self._segments.values()}),
            )


def _subtract(counts: dict[bytes, int], key: bytes, size: int) -> None:
    left = counts.get(key, 0) - size
    if left > 0:
        counts[key] = left
    else:
        counts.pop(key, None)
