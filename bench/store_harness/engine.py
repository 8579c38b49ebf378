"""The segment engine as a caller sees it: put until durable, get cold, with and without the digest."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.store_harness.cases import MIB, Case
from headrace.kvcache.entries import GetResult, Loaded
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.store.base import PutEntry, PutTicket
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.settings import SegmentSettings
from headrace.kvcache.tier.writer import BATCH_BYTES as TIER_BATCH_BYTES

_CALLERS = 2
"""Requests at a time, so that the disk has work while one of them is answered."""
_REQUEST_BYTES = 32 * MIB
_DEADLINE_S = 120.0


class Engine:
    """A segment store of its own directory, with its SQLite index."""

    def __init__(self, directory: Path, threads: int) -> None:
        self.directory = directory
        self.settings = SegmentSettings(read_threads=threads, write_threads=threads)
        self._index = SqliteIndex(directory / "index.sqlite")
        self.store = SegmentStore(PosixFileLayer(directory), self._index, self.settings)
        if not self.store.stats().direct_io:
            raise OSError(f"{directory} has no O_DIRECT: name another one with --dir")

    def write(self, case: Case, entries: Sequence[PutEntry]) -> float:
        """Seconds until every entry is durable, put in the batches of the tier's writer. A caller whose entries find no
        room in the queue waits for the oldest put, and offers them again."""
        per_put = max(1, TIER_BATCH_BYTES // case.record)
        waiting: deque[PutTicket] = deque()
        first = 0
        started = time.perf_counter()
        while first < len(entries):
            batch = entries[first : first + per_put]
            ticket = self.store.put_many(batch)
            taken = sum(ticket.accepted)
            first += taken
            waiting.append(ticket)
            if taken < len(batch):
                _must_be_durable(waiting.popleft())
        self.store.flush(_DEADLINE_S)
        for ticket in waiting:
            _must_be_durable(ticket)
        return time.perf_counter() - started

    def rows(self, entries: Sequence[PutEntry]) -> list[IndexRow]:
        """Where they lie."""
        found = self._index.get_many([entry.info.key for entry in entries], time.monotonic() + _DEADLINE_S)
        rows = [row for row in found if row is not None]
        if len(rows) != len(entries):
            raise OSError("the index lost rows")
        return rows

    def read_verified(self, case: Case, entries: Sequence[PutEntry]) -> float:
        """Seconds to get all: index, read, header, digest."""
        keys = [entry.info.key for entry in entries]
        return _ask(len(keys), case, lambda a, b: self.store.get_many(keys[a:b], time.monotonic() + _DEADLINE_S))

    def read_unverified(self, case: Case, rows: Sequence[IndexRow]) -> float:
        """Seconds to read all, the header checked and the digest not: what verification leaves of the disk."""
        reader = self.store.reader
        return _ask(
            len(rows),
            case,
            lambda a, b: reader.read(rows[a:b], time.monotonic() + _DEADLINE_S, check_digest=False),
        )

    def close(self) -> None:
        self.store.close()


def _ask(count: int, case: Case, get: Callable[[int, int], Sequence[GetResult]]) -> float:
    per_request = max(1, _REQUEST_BYTES // case.record)
    starts = iter(range(0, count, per_request))
    lock = threading.Lock()
    failures: list[str] = []

    def caller() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            for result in get(start, min(start + per_request, count)):
                if isinstance(result, Loaded):
                    result.release()
                else:
                    failures.append(result.value)

    threads = [threading.Thread(target=caller) for _ in range(_CALLERS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    if failures:
        raise OSError(f"{len(failures)} entries did not come: {sorted(set(failures))}")
    return seconds


def _must_be_durable(ticket: PutTicket) -> None:
    if ticket.durable.result(timeout=_DEADLINE_S) != ticket.accepted:
        raise OSError("an entry was not stored; is the disk full?")
