"""Segments of dead writers: sealed, put into the index where they are missing there, left to expire like all others."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.kvcache.cache_events import EventSink
from headrace.kvcache.entries import Miss
from headrace.kvcache.index.base import Index, IndexRow
from headrace.kvcache.store.base import WallClock
from headrace.kvcache.store.files import FileLayer, miss_of
from headrace.kvcache.store.rebuild import outlives
from headrace.kvcache.store.retention.classes import expired
from headrace.kvcache.store.segments.commit import row_of, stored_events
from headrace.kvcache.store.segments.erasures import Erasures
from headrace.kvcache.store.segments.names import SegmentName, bucket_name
from headrace.kvcache.store.segments.open_segment import write_sidecar
from headrace.kvcache.store.segments.record import Header, segment_id
from headrace.kvcache.store.segments.recovery import FoundSegment, find_segments, read_records, read_sidecar
from headrace.kvcache.store.segments.settings import Liveness
from headrace.kvcache.store.segments.sidecar import encode_sidecar
from headrace.kvcache.store.segments.table import SegmentTable
from headrace.kvcache.store.segments.writers import WriterLock, known_writers, take_over

_log = logging.getLogger(__name__)
_BATCH = 1024


@dataclass(frozen=True)
class Adopted:
    """What one pass took over."""

    segments: int = 0
    entries: int = 0
    """Records that the index did not know."""


class Adoption:
    """For the elected sweeper. Blocks nobody: it reads, and writes only files that nobody else writes."""

    def __init__(
        self,
        files: FileLayer,
        index: Index,
        table: SegmentTable,
        events: EventSink,
        wall: WallClock,
        own: str,
        liveness: Liveness | None,
        erasures: Erasures,
        index_timeout_s: float,
        *,
        direct: bool,
    ) -> None:
        self._files = files
        self._index = index
        self._table = table
        self._events = events
        self._wall = wall
        self._own = own
        self._liveness = liveness
        self._erasures = erasures
        self._index_timeout_s = index_timeout_s
        self._direct = direct
        self._unlisted: set[str] = set()

    def run(self) -> Adopted:
        """Take over every dead writer. IndexUnavailable or OSError breaks off: what is left is done in a later pass. A
        segment that cannot be read is left as it is, with whatever the index knows of it."""
        locks: dict[str, WriterLock] = {}
        settled: set[str] = set()
        try:
            for writer in known_writers(self._files):
                self._take(locks, writer)
            # Listed only now: a writer may have made segments until its lock was ours.
            theirs = self._listed(locks)
            entries = segments = 0
            for found in theirs:
                try:
                    entries += self._adopt(found)
                    segments += 1
                except OSError as error:
                    if miss_of(error) is not Miss.SERVER:
                        raise
                    _log.warning("%s cannot be adopted yet: %s", found.name.path, error)
                    self._unlisted.add(found.name.writer)
            settled = set(locks) - self._unlisted
        finally:
            for writer, lock in locks.items():
                lock.release(settled=writer in settled)
        return Adopted(segments, entries)

    def _take(self, locks: dict[str, WriterLock], writer: str) -> bool:
        if writer == self._own:
            return False
        lock = take_over(self._files, writer, self._liveness)
        if lock is None:
            return False
        locks[writer] = lock
        return True

    def _listed(self, locks: dict[str, WriterLock]) -> list[FoundSegment]:
        """Segments of the taken writers, and of such as have no lock file but left a segment without a sidecar."""
        self._unlisted = set()
        lost: set[str] = set()
        theirs = []
        now = self._wall()
        for found in find_segments(self._files):
            writer = found.name.writer
            if expired(found.name.bucket.end, now) or writer in lost:
                continue
            if writer not in locks and not found.sidecar:
                if self._take(locks, writer):
                    # What of it was listed before is not among ours: another pass looks at it again.
                    self._unlisted.add(writer)
                else:
                    lost.add(writer)
            if writer in locks:
                theirs.append(found)
        return theirs

    def reindex(self, path: str) -> int:
        """Put the records of a segment that nobody writes any more into the index where they are missing; returns how
        many were. A segment that is gone has none."""
        name = SegmentName.parse(path)
        if name is None:
            return 0
        try:
            headers = read_records(self._files, FoundSegment(name, sidecar=True), direct=self._direct)
        except FileNotFoundError:
            return 0
        return self._add_missing(path, headers)

    def _adopt(self, found: FoundSegment) -> int:
        headers = read_sidecar(self._files, found.name) if found.sidecar else None
        if headers is None:
            headers = self._seal(found)
        return self._add_missing(found.name.path, headers)

    def _seal(self, found: FoundSegment) -> tuple[Header, ...]:
        """What the dead writer did not come to: sync, cut off what is no record, sidecar."""
        path = found.name.path
        headers = read_records(self._files, FoundSegment(found.name, sidecar=False), direct=self._direct)
        if not headers:
            self._files.unlink(path)
            return ()
        file = self._files.open(path, direct=self._direct, writable=True)
        try:
            # A killed process leaves its writes in the machine, not yet on the disk.
            file.truncate(headers[-1].end)
            file.datasync()
        finally:
            file.close()
        identity = segment_id(path)
        write_sidecar(self._files, found.name, encode_sidecar(headers, identity, headers[-1].end))
        self._table.sealed(path, headers[-1].end)
        return headers

    def _add_missing(self, path: str, headers: Sequence[Header]) -> int:
        added = 0
        self._erasures.refresh({path})
        for start in range(0, len(headers), _BATCH):
            batch = headers[start : start + _BATCH]
            held = self._index.held([header.info.key for header in batch], self._deadline())
            wanted = []
            for header, row in zip(batch, held, strict=True):
                new = row_of(header, path)
                if (row is None or outlives(new, row)) and not self._erasures.covers(path, new.tenant_tag):
                    wanted.append((header, new))
            if wanted:
                self._put(wanted, path, [row for row in held if row is not None])
            added += len(wanted)
        return added

    def _put(self, wanted: Sequence[tuple[Header, IndexRow]], path: str, held: Iterable[IndexRow]) -> None:
        rows = [row for _, row in wanted]
        new = {row.key for row in rows}
        self._index.put_many(rows, self._deadline())
        self._table.remove(row for row in held if row.key in new)
        self._table.add(rows)
        bucket = bucket_name(path)
        for event in stored_events((header, bucket) for header, _ in wanted):
            self._events(event)

    def _deadline(self) -> float:
        return time.monotonic() + self._index_timeout_s
