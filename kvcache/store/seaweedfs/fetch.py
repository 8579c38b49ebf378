"""Many records at a time: threads, bytes in memory, the deadline of the caller, and what reads showed to be wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from functools import partial

from headrace.kvcache.entries import GetResult, Loaded, Miss
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.store.seaweedfs.budget import ReadBudget
from headrace.kvcache.store.seaweedfs.eraser import Eraser
from headrace.kvcache.store.seaweedfs.intake import Intake
from headrace.kvcache.store.seaweedfs.reader import RecordReader
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.segments.counters import Counters


class Fetcher:
    """Thread-safe."""

    def __init__(
        self, settings: SeaweedSettings, reader: RecordReader, intake: Intake, eraser: Eraser, counters: Counters
    ) -> None:
        self._busy_wait_s = settings.busy_wait_s
        self._reader = reader
        self._intake = intake
        self._eraser = eraser
        self._counters = counters
        self.budget = ReadBudget(settings.read_bytes)
        self._threads = ThreadPoolExecutor(settings.readers, "seaweed-read")

    def fetch(self, rows: Sequence[IndexRow | Miss], deadline: float, epoch: int) -> Sequence[GetResult]:
        """One result per row, in order; misses are passed on. All are counted. `epoch` (Eraser) was read before the
        rows: what was erased since then is not shown."""
        reads = [
            self._threads.submit(self._read, row, deadline, epoch) if isinstance(row, IndexRow) else row for row in rows
        ]
        results = [read if isinstance(read, Miss) else self._await(read, deadline) for read in reads]
        for result in results:
            if isinstance(result, Miss):
                self._counters.miss(result)
            else:
                self._counters.add(hits=1, read_bytes=result.info.length)
        return results

    def close(self) -> None:
        """Reads that have not begun are misses."""
        self._threads.shutdown(cancel_futures=True)

    def _read(self, row: IndexRow, deadline: float, epoch: int) -> GetResult:
        """One record within the budget. Rows that point to nothing go, spoilt records are written again."""
        if not self.budget.take(row.length, min(deadline, time.monotonic() + self._busy_wait_s)):
            return Miss.BUSY
        give = _once(partial(self.budget.give, row.length))
        try:
            outcome = self._reader.read(row, deadline)
        except BaseException:
            give()
            raise
        if outcome.spoilt:
            self._counters.add(quarantined=1)
        if isinstance(outcome.result, Loaded):
            if self._eraser.erased_since(epoch, outcome.result.info):
                give()
                return Miss.DROPPED
            if outcome.spoilt:
                self._intake.rewrite(outcome.result, row.retention, epoch)
            return replace(outcome.result, release=give)
        give()
        if outcome.gone or outcome.spoilt:
            self._eraser.forget(row)
        return outcome.result

    @staticmethod
    def _await(read: Future[GetResult], deadline: float) -> GetResult:
        """A read's result, or a miss at the deadline; what comes later is let go of."""
        try:
            return read.result(max(0.0, deadline - time.monotonic()))
        except CancelledError:  # the store is being closed
            return Miss.NOT_CONNECTED
        except FutureTimeout:
            read.cancel()
            read.add_done_callback(_release)
            return Miss.TIMEOUT


def _once(release: Callable[[], None]) -> Callable[[], None]:
    """A release that counts the first time it is called."""
    pending = [release]

    def released() -> None:
        with contextlib.suppress(IndexError):  # of many threads one takes it out
            pending.pop()()

    return released


def _release(read: Future[GetResult]) -> None:
    """Let go of a payload that came too late."""
    if not read.cancelled() and read.exception() is None:
        result = read.result()
        if isinstance(result, Loaded):
            result.release()
