"""What a process knows of the segments of its store: sizes and tenants. A view for decisions; never needed to read.

Filled from the index at the start and, by the sweeper, at each sweep; kept up by this process's own writes and
removals. What others wrote and removed a process that does not sweep learns when a tenant comes near its quota.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.kvcache.entries import EntryKind
from headrace.kvcache.index.base import Index, IndexRow
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
        self.live: dict[int, tuple[EntryKind, int, bytes]] = {}
        """By place: kind, payload bytes, tenant."""
        self.tenants: dict[bytes, int] = {}


class SegmentTable:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[str, _Segment] = {}
        self._entries = dict.fromkeys(EntryKind, 0)
        self._payload = 0
        self._tenants: dict[bytes, int] = {}
        self._changes: list[list[Callable[[SegmentTable], None]]] = []
        """What happened since each `replace` that is under way began to read."""

    def replace(self, rows: Iterable[IndexRow]) -> None:
        """Start again from what the index says. What happens while it is read counts too: every change here comes
        after the index's own, and is done again on what was read."""
        fresh = SegmentTable()
        changes: list[Callable[[SegmentTable], None]] = []
        with self._lock:
            self._changes.append(changes)
        try:
            fresh.add(rows)
        except BaseException:
            with self._lock:
                self._changes = [each for each in self._changes if each is not changes]
            raise
        with self._lock:
            self._changes = [each for each in self._changes if each is not changes]
            for change in changes:
                change(fresh)
            for path, segment in fresh._segments.items():
                old = self._segments.get(path)
                if old is not None:
                    segment.sealed = old.sealed
                    segment.disk_bytes = max(segment.disk_bytes, old.disk_bytes)
            self._segments, self._entries = fresh._segments, fresh._entries
            self._payload, self._tenants = fresh._payload, fresh._tenants

    def add(self, rows: Iterable[IndexRow]) -> None:
        """Records that the index now points to."""
        rows = tuple(rows)
        with self._lock:
            self._note(lambda table: table.add(rows))
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
                segment.live[row.place] = (row.kind, row.length, row.tenant_tag)
                segment.disk_bytes = max(segment.disk_bytes, row.place + size)
                segment.tenants[row.tenant_tag] = segment.tenants.get(row.tenant_tag, 0) + size
                self._tenants[row.tenant_tag] = self._tenants.get(row.tenant_tag, 0) + size
                self._entries[row.kind] += 1
                self._payload += row.length

    def remove(self, rows: Iterable[IndexRow]) -> None:
        """Records that the index points to no more."""
        rows = tuple(rows)
        with self._lock:
            self._note(lambda table: table.remove(rows))
            for row in rows:
                segment = self._segments.get(row.group)
                if segment is not None:
                    self._remove(segment, row.place)

    def sealed(self, path: str, disk_bytes: int | None = None) -> None:
        """It has a sidecar; `disk_bytes` of its file, where known."""
        with self._lock:
            segment = self._segments.get(path)
            if segment is not None:
                segment.sealed, segment.disk_bytes = True, disk_bytes or segment.disk_bytes

    def forget(self, path: str) -> None:
        """The file is gone, and with it what was counted there: its rows are out of the index, or replaced."""
        with self._lock:
            self._note(lambda table: table.forget(path))
            segment = self._segments.pop(path, None)
            if segment is not None:
                for place in tuple(segment.live):
                    self._remove(segment, place)

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
                    sum(segment.tenants.values()),
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

    def _note(self, change: Callable[[SegmentTable], None]) -> None:
        for changes in self._changes:
            changes.append(change)

    def _remove(self, segment: _Segment, place: int) -> None:
        entry = segment.live.pop(place, None)
        if entry is not None:
            kind, length, tenant_tag = entry
            size = record_bytes(length)
            _subtract(segment.tenants, tenant_tag, size)
            _subtract(self._tenants, tenant_tag, size)
            self._entries[kind] -= 1
            self._payload -= length


def take_out(index: Index, table: SegmentTable, rows: Sequence[IndexRow], deadline: float) -> list[IndexRow]:
    """Take rows out of both. Returns those whose entries are lost by it: of the others the index knows another place,
    where they were written again meanwhile. Raises IndexUnavailable."""
    index.remove_many(rows, deadline)
    table.remove(rows)
    held = index.held([row.key for row in rows], deadline)
    return [row for row, other in zip(rows, held, strict=True) if other is None]


def _subtract(counts: dict[bytes, int], key: bytes, size: int) -> None:
    left = counts.get(key, 0) - size
    if left > 0:
        counts[key] = left
    else:
        counts.pop(key, None)
