"""Reads: index rows → verified payloads, by a few threads, each request until its deadline.

Neighbours on disk are read by one preadv into one buffer per record. A thread verifies what it read before anybody sees
it (L3): the header is this row's, at this place, of this segment; the digest is the payload's. When the deadline passes
first, the request is answered and the thread gives the buffer back when its read completes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.kvcache.entries import GetResult, Loaded, Miss, payload_digest
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.store.files import StoreFile, miss_of
from headrace.kvcache.store.segments.buffers import Buffer, BufferPool
from headrace.kvcache.store.segments.handles import Handle, SegmentFiles
from headrace.kvcache.store.segments.record import ALIGN, HEADER_BYTES, Header, read_header, record_bytes, segment_id

_log = logging.getLogger(__name__)
_MAX_RUN = 512
_MAX_OFFSET = 1 << 60
_OF_ONE = frozenset({Miss.HOLE, Miss.SERVER})
"""Failures of a read that may lie in one of its records: the others are read without it."""
_ZERO_PAGE = bytes(HEADER_BYTES)


class _Batch:
    """The results of one request."""

    def __init__(self, size: int) -> None:
        self.results: list[GetResult] = [Miss.TIMEOUT] * size
        self.expired = False
        self._left = size
        self._changed = threading.Condition()

    def put(self, results: Sequence[tuple[int, GetResult]]) -> None:
        """Some results by their places; after the deadline they are thrown away."""
        with self._changed:
            if not self.expired:
                for place, result in results:
                    self.results[place] = result
                self._left -= len(results)
                if self._left == 0:
                    self._changed.notify_all()
                return
        for _, result in results:
            if isinstance(result, Loaded):
                result.release()

    def wait(self, deadline: float) -> list[GetResult]:
        with self._changed:
            while self._left:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            self.expired = True
            return self.results


@dataclass(slots=True, eq=False)
class _Run:
    """Records that lie one behind the other."""

    batch: _Batch
    handle: Handle
    rows: list[IndexRow]
    places: list[int]
    buffers: list[Buffer]
    deadline: float
    check_digest: bool
    answered: list[bool]


class _Release:
    """Gives a buffer back once, however often it is called."""

    __slots__ = ("_buffer", "_pool")

    def __init__(self, pool: BufferPool, buffer: Buffer) -> None:
        self._pool = pool
        self._buffer: Buffer | None = buffer

    def __call__(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.give(buffer)


def check_record(record: memoryview, row: IndexRow, identity: bytes, *, check_digest: bool = True) -> Header | Miss:
    """The header of a whole record if it is the one the row names, or why it is not (L3)."""
    header = read_header(record)
    if header is None:
        return Miss.HOLE if record[:HEADER_BYTES] == _ZERO_PAGE else Miss.HEADER
    info = header.info
    if info.key != row.key or info.length != row.length or header.offset != row.place:
        return Miss.HEADER
    if header.segment_id != identity or info.kind is not row.kind:
        return Miss.HEADER
    if check_digest and payload_digest(record[HEADER_BYTES : HEADER_BYTES + info.length]) != info.digest:
        return Miss.DIGEST
    return header


class SegmentReader:
    """`threads` threads that read until `close`."""

    def __init__(
        self, files: SegmentFiles, buffers: BufferPool, threads: int, read_bytes: int, busy_wait_s: float
    ) -> None:
        self._files = files
        self._buffers = buffers
        self._read_bytes = read_bytes
        self._busy_wait_s = busy_wait_s
        self._runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"store-read-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, rows: Sequence[IndexRow], deadline: float, *, check_digest: bool = True) -> list[GetResult]:
        """One result per row, in order; `check_digest=False` is for measuring what verification costs, and shows
        unverified bytes to nobody else."""
        batch = _Batch(len(rows))
        if not rows:
            return batch.results
        order = sorted(range(len(rows)), key=lambda place: (rows[place].group, rows[place].place))
        # Runs start in the order of their first row in the request: prefix first.
        runs = sorted(self._runs_of(rows, order), key=min)
        for places in runs:
            self._start(batch, rows, places, deadline, check_digest)
        return batch.wait(deadline)

    def close(self) -> None:
        """Reads in flight end first; later ones are misses."""
        with self._closing:
            self._closed = True
            for _ in self._threads:
                self._runs.put(None)
        for thread in self._threads:
            thread.join()

    def _runs_of(self, rows: Sequence[IndexRow], order: Sequence[int]) -> list[list[int]]:
        runs: list[list[int]] = []
        group, end, size = "", -1, 0
        for place in order:
            row = rows[place]
            length = record_bytes(row.length)
            if length > self._buffers.limit:
                # A real record that this process cannot hold, or a wrong row: its header alone tells.
                length = HEADER_BYTES
            if row.group != group or row.place != end or size + length > self._read_bytes or len(runs[-1]) == _MAX_RUN:
                runs.append([])
                size = 0
            runs[-1].append(place)
            group, end, size = row.group, row.place + length, size + length
        return runs

    def _start(
        self, batch: _Batch, rows: Sequence[IndexRow], places: list[int], deadline: float, check_digest: bool
    ) -> None:
        offset = rows[places[0]].place
        if offset % ALIGN or offset > _MAX_OFFSET:
            # No record of ours lies there: the row is wrong, and asking the disk would only say EINVAL.
            batch.put([(place, Miss.HEADER) for place in places])
            return
        handle = self._files.pin(rows[places[0]].group)
        if handle is None:
            batch.put([(place, Miss.DROPPED) for place in places])
            return
        buffers = self._take(rows, places, deadline)
        batch.put([(place, Miss.BUSY) for place in places[len(buffers) :]])
        if not buffers:
            self._files.unpin(handle)
            return
        places = places[: len(buffers)]
        run = _Run(
            batch,
            handle,
            [rows[place] for place in places],
            places,
            buffers,
            deadline,
            check_digest,
            [False] * len(places),
        )
        with self._closing:
            if not self._closed:
                self._runs.put(run)
                return
        self._miss(run, 0, len(run.rows), Miss.NOT_CONNECTED)
        self._files.unpin(handle)

    def _take(self, rows: Sequence[IndexRow], places: Sequence[int], deadline: float) -> list[Buffer]:
        """A buffer for each record, as far as there is room, waiting a little for each that there is none for now."""
        sizes = [
            size if (size := record_bytes(rows[place].length)) <= self._buffers.limit else HEADER_BYTES
            for place in places
        ]
        buffers = self._buffers.take_now(sizes)
        for size in sizes[len(buffers) :]:
            buffer = self._buffers.take(size, min(deadline, time.monotonic() + self._busy_wait_s))
            if buffer is None:
                break
            buffers.append(buffer)
        return buffers

    def _work(self) -> None:
        while (run := self._runs.get()) is not None:
            try:
                self._read(run)
            except Exception:  # noqa: BLE001 - the boundary: one bad read must not end all reading (L13)
                _log.exception("a read of %s was given up", run.handle.path)
                self._miss(run, 0, len(run.rows), Miss.SERVER)
            finally:
                self._files.unpin(run.handle)

    def _read(self, run: _Run) -> None:
        if run.batch.expired or time.monotonic() >= run.deadline:
            self._miss(run, 0, len(run.rows), Miss.TIMEOUT)
            return
        try:
            file = self._files.open(run.handle, run.deadline)
        except OSError as error:
            self._miss(run, 0, len(run.rows), miss_of(error))
            return
        parts = [(0, len(run.rows))]
        while parts:
            start, stop = parts.pop()
            parts += self._read_part(run, file, start, stop)

    def _read_part(self, run: _Run, file: StoreFile, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """Read the records [start, stop) of a run; what of them must be read again by itself, last part first."""
        if run.batch.expired or time.monotonic() >= run.deadline:
            self._miss(run, start, stop, Miss.TIMEOUT)
            return ()
        views = [buffer.view for buffer in run.buffers[start:stop]]
        try:
            count = file.preadv(views, run.rows[start].place, run.deadline)
        except OSError as error:
            cause = miss_of(error)
            if cause in _OF_ONE and stop - start > 1:
                middle = (start + stop) // 2
                return (middle, stop), (start, middle)
            self._miss(run, start, stop, cause)
            return ()
        whole, end = start, 0
        while whole < stop and (end := end + run.buffers[whole].size) <= count:
            whole += 1
        if whole == start:
            self._miss(run, start, start + 1, Miss.SHORT)
            whole += 1
        else:
            self._verify(run, start, whole)
        return ((whole, stop),) if whole < stop else ()

    def _verify(self, run: _Run, start: int, stop: int) -> None:
        """Answer the records [start, stop), which were read whole."""
        identity = segment_id(run.handle.path)
        good: list[tuple[int, GetResult]] = []
        bad: list[tuple[int, Miss]] = []
        for position in range(start, stop):
            row, buffer = run.rows[position], run.buffers[position]
            whole = buffer.size > HEADER_BYTES
            found = check_record(buffer.view, row, identity, check_digest=run.check_digest and whole)
            if not whole and not isinstance(found, Miss):
                found = Miss.BUSY
            if isinstance(found, Miss):
                bad.append((position, found))
            else:
                payload = buffer.view[HEADER_BYTES : HEADER_BYTES + row.length].toreadonly()
                good.append((run.places[position], Loaded(found.info, payload, _Release(self._buffers, buffer))))
                run.answered[position] = True
            if run.batch.expired:
                break
        run.batch.put(good)
        for position, miss in bad:
            self._miss(run, position, position + 1, miss)
        self._miss(run, start, stop, Miss.TIMEOUT)

    def _miss(self, run: _Run, start: int, stop: int, cause: Miss) -> None:
        """Answer what of [start, stop) is not answered yet."""
        positions = [position for position in range(start, stop) if not run.answered[position]]
        if not positions:
            return
        for position in positions:
            run.answered[position] = True
        self._buffers.give(*(run.buffers[position] for position in positions))
        run.batch.put([(run.places[position], cause) for position in positions])


ReadRows = Callable[[Sequence[IndexRow], float], list[GetResult]]
