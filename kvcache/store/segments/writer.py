"""The writer: queue → segments, in order, many records in one pwritev, a few of those at once.

One segment is open per bucket of namespace, class and expiry that is written to. What was written is handed to the
commit thread in groups, so that the next group is written while the last one syncs. Places are assigned by one thread;
the writes into them are done by a few, since a disk is fast only with several requests.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from headrace.kvcache.store.files import FileLayer
from headrace.kvcache.store.segments.buffers import BufferPool
from headrace.kvcache.store.segments.groups import Group, Rotation, Run, offset_of
from headrace.kvcache.store.segments.names import Bucket, SegmentName
from headrace.kvcache.store.segments.open_segment import OpenSegment
from headrace.kvcache.store.segments.own_segments import OwnSegments
from headrace.kvcache.store.segments.pending import Pending, WriteQueue
from headrace.kvcache.store.segments.record import ALIGN, Header, write_fields
from headrace.kvcache.store.segments.settings import SegmentSettings
from headrace.kvcache.store.segments.writes import open_writes

_log = logging.getLogger(__name__)
_MAX_RUN = 512
"""Records of one pwritev; below every system's IOV_MAX."""
_TAKE_RUNS = 4
_MAX_OPEN = 8
"""Buckets of one namespace and class that have an open segment: writes go to the bucket of now, and re-appends of
eviction to some others."""
_IDLE_S = 60.0

Fail = Callable[[Sequence[Pending], str], None]
"""Entries that will not be durable, and the cause."""


def _alike(a: Bucket, b: Bucket) -> bool:
    return a.namespace == b.namespace and a.retention == b.retention


def _unexpected(failure: Exception) -> Exception | None:
    """What deserves its trace in the log: no disk's answer, but a mistake of ours."""
    return None if isinstance(failure, OSError) else failure


def cause_of(error: OSError) -> str:
    """An OSError as stats count it: `ENOSPC`, `EIO` …"""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


class SegmentWriter:
    """Runs until the queue is closed and drained; then retires every open segment and sends None behind it."""

    def __init__(
        self,
        files: FileLayer,
        settings: SegmentSettings,
        entries: WriteQueue,
        buffers: BufferPool,
        fail: Fail,
        covered: Callable[[Pending], bool],
        look: Callable[[str], None],
        own: OwnSegments,
        room: Callable[[str, int], int],
        *,
        direct: bool,
    ) -> None:
        """`covered`: whether an erasure that came after the entry was accepted covers it. `look`: learn what
        other processes erased, before a segment takes more. `room`: the bytes that the
        store's quota gives this new segment, at least so many; OSError when it has none."""
        self.groups: queue.Queue[Group | None] = queue.Queue(maxsize=1)
        self._files = files
        self._settings = settings
        self._entries = entries
        self._buffers = buffers
        self._fail = fail
        self._covered = covered
        self._look = look
        self._own = own
        self._room = room
        self._direct = direct
        self._lock = threading.Lock()
        """Assignment of records to segments, against rotation."""
        self._open: dict[Bucket, OpenSegment] = {}
        """In order of their last use."""
        self._used: dict[Bucket, float] = {}
        self._retiring: list[OpenSegment] = []
        self._number = 0
        self._sequence = 0
        self._group = Group()
        self._writes = open_writes(files, settings.write_threads, self._ended)
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)

    def start(self) -> None:
        self._writes.start()
        self._thread.start()

    def join(self) -> None:
        self._thread.join()
        self._writes.join()

    def rotate(self, namespace: bytes | None = None, then: Callable[[], None] = lambda: None) -> Rotation:
        """Whatever is assigned from now on, of that namespace or of all, goes into new segments; `then` happens at the
        same moment."""
        with self._lock:
            old = [self._open.pop(bucket) for bucket in list(self._open) if namespace in (None, bucket.namespace)]
            self._retiring += old
            then()
            rotation = Rotation(tuple(segment.path for segment in old), self._number)
        self._entries.wake()
        return rotation

    def retire(self, path: str) -> None:
        """Nothing more goes into that segment, if it is still written to."""
        with self._lock:
            for bucket, segment in list(self._open.items()):
                if segment.path == path:
                    self._retiring.append(self._open.pop(bucket))
        self._entries.wake()

    def _run(self) -> None:
        settings = self._settings
        while not self._entries.drained:
            group = self._group
            if group.size:
                left = group.started + settings.sync_interval_s - time.monotonic()
                timeout = max(0.0, min(left, settings.sync_idle_s))
            else:
                timeout = settings.sync_interval_s
            taken = self._entries.take(_TAKE_RUNS * settings.write_bytes, timeout, eager=group.size > 0)
            if taken:
                try:
                    self._write(taken)
                except Exception:  # noqa: BLE001 - the boundary: one bad entry must not end all writing (L13)
                    _log.exception("entries were given up before they were written")
                    self._lost([pending for pending in taken if not pending.dispatched], "internal")
            else:
                self._retire_idle()
            self._collect_retired()
            if group.size or group.retired:
                age = time.monotonic() - group.started
                if not taken or group.size >= settings.sync_bytes or age >= settings.sync_interval_s:
                    self._cut()
        self.rotate()
        self._collect_retired()
        self._cut()
        self.groups.put(None)
        self._writes.close()

    def _collect_retired(self) -> None:
        with self._lock:
            self._group.retired.extend(self._retiring)
            self._retiring.clear()

    def _cut(self) -> None:
        group, self._group = self._group, Group()
        if group.size or group.retired:
            self.groups.put(group)

    def _write(self, taken: Sequence[Pending]) -> None:
        """Records of one bucket that are neighbours in the queue become neighbours on disk."""
        start = 0
        for end in range(1, len(taken) + 1):
            if end == len(taken) or taken[end].bucket != taken[start].bucket:
                self._write_run(taken[start].bucket, taken[start:end])
                start = end

    def _write_run(self, bucket: Bucket, run: Sequence[Pending]) -> None:
        rest = list(run)
        while rest:
            try:
                with self._lock:
                    segment = self._segment(bucket, rest[0].size)
                # Behind the segment's creation, new ones too: an erasure that it is not yet part of is seen here.
                self._look(segment.path)
            except OSError as error:
                _log.error("no segment can be opened in %s: %s", bucket.name, error)
                self._lost(rest, cause_of(error))
                return
            placed, covered, rest = self._place(bucket, segment, rest)
            self._lost(covered, "dropped")
            if placed:
                self._write_placed(segment, placed)

    def _place(
        self, bucket: Bucket, segment: OpenSegment, run: Sequence[Pending]
    ) -> tuple[list[Pending], list[Pending], list[Pending]]:
        """What has its place in the segment, what an erasure covers, what did not fit: all of it, if the segment takes
        nothing more."""
        placed: list[Pending] = []
        covered: list[Pending] = []
        with self._lock:
            if self._open.get(bucket) is not segment:
                return [], [], list(run)
            for position, pending in enumerate(run):
                if self._covered(pending):
                    covered.append(pending)
                    continue
                if not segment.fits(pending.size):
                    return placed, covered, list(run[position:])
                self._sequence += 1
                offset = segment.assign(pending.size)
                pending.header = Header(pending.info, self._sequence, offset, bucket.end, segment.identity)
                pending.group = segment.path
                placed.append(pending)
        return placed, covered, []

    def _segment(self, bucket: Bucket, size: int) -> OpenSegment:
        segment = self._open.pop(bucket, None)
        self._used[bucket] = time.monotonic()
        if segment is not None and segment.fits(size):
            self._open[bucket] = segment
            return segment
        before = segment.name if segment is not None else None
        if segment is not None:
            self._retiring.append(segment)
        alike = [other for other in self._open if _alike(other, bucket)]
        if len(alike) >= _MAX_OPEN:
            self._retiring.append(self._open.pop(alike[0]))
        self._number += 1
        name = SegmentName(bucket, self._settings.writer, self._number)
        self._own.opened(name.path)
        try:
            given = self._room(name.path, size + ALIGN)
            segment = OpenSegment(self._files, name, given, direct=self._direct, before=before)
        except OSError:
            self._own.closed(name.path)
            raise
        self._open[bucket] = segment
        return segment

    def _retire_idle(self) -> None:
        """Seal what time has passed by: an older bucket than another open one of its class, not written to for long."""
        now = time.monotonic()
        with self._lock:
            for bucket in list(self._open):
                passed = any(_alike(other, bucket) and other.end > bucket.end for other in self._open)
                if passed and now - self._used[bucket] >= _IDLE_S:
                    self._retiring.append(self._open.pop(bucket))
            self._used = {bucket: self._used[bucket] for bucket in self._open}

    def _write_placed(self, segment: OpenSegment, placed: Sequence[Pending]) -> None:
        if not self._group.size:
            self._group.started = time.monotonic()
        start, size = 0, 0
        for end, pending in enumerate(placed, 1):
            size += pending.size
            if end == len(placed) or size + placed[end].size > self._settings.write_bytes or end - start == _MAX_RUN:
                self._dispatch(segment, placed[start:end])
                self._group.size += size
                start, size = end, 0

    def _dispatch(self, segment: OpenSegment, pendings: Sequence[Pending]) -> None:
        buffers = []
        for pending in pendings:
            if pending.header is None or pending.buffer is None:
                raise AssertionError("a placed record has its header and its bytes")
            write_fields(pending.header, pending.buffer.view)
            buffers.append(pending.buffer)
        for pending in pendings:
            pending.dispatched = True
        self._group.begin()
        self._writes.submit(Run(self._group, segment, pendings, offset_of(pendings[0]), buffers))

    def _ended(self, run: Run, failure: Exception | None) -> None:
        """Of a thread of the writes."""
        try:
            if failure is None:
                self._give_back(run.pendings)
            else:
                run.segment.broken = True
                _log.error("%s takes no more writes: %s", run.segment.path, failure, exc_info=_unexpected(failure))
                self._lost(run.pendings, cause_of(failure) if isinstance(failure, OSError) else "internal")
        finally:
            run.group.end(run.segment, run.pendings if failure is None else ())

    def _lost(self, pendings: Sequence[Pending], cause: str) -> None:
        pendings = [pending for pending in pendings if not pending.settled]
        if pendings:
            self._give_back(pendings)
            self._fail(pendings, cause)

    def _give_back(self, pendings: Sequence[Pending]) -> None:
        self._buffers.give(*(pending.buffer for pending in pendings if pending.buffer is not None))
        for pending in pendings:
            pending.buffer = None
