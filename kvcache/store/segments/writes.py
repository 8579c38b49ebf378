"""Threads that write runs of records: C++ ones where the files are descriptors, else Python's.

The C++ threads never take the interpreter lock between two writes, so the disk always has its next request; one Python
thread hears of what they wrote. Python threads are the twin, for file layers of other kinds (3FS, tests) and machines
without a compiler.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import queue
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable

from headrace.kvcache.store.files import FileLayer
from headrace.kvcache.store.segments.groups import Run
from headrace.kvcache.store.segments.native.library import Outcome, RecordsLibrary, records_library
from headrace.kvcache.store.segments.record import FIELD_BYTES, HEADER_BYTES, stamp_header

_log = logging.getLogger(__name__)

_LEAST, _MOST = 4, 64
"""Runs of which the Python side hears at once: few of 2 MiB, so that their memory comes back soon, and not one by one,
since waking a thread costs it 50 µs."""

Ended = Callable[[Run, Exception | None], None]
"""Told once of every run, from a thread of the writes: None when all of it is in the file."""


class Writes(ABC):
    """Runs are written in any order. The headers in them are whole but for their checksum, which is added here."""

    @abstractmethod
    def start(self) -> None:
        """Make the threads; nothing is submitted before."""

    @abstractmethod
    def submit(self, run: Run) -> None:
        """Write it some time; may wait while many others do. How many wait is bounded by the memory they lie in."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more is submitted."""

    @abstractmethod
    def join(self) -> None:
        """After `close`: returns when every run has ended."""


class ThreadWrites(Writes):
    """Python threads, over any file layer."""

    def __init__(self, threads: int, ended: Ended) -> None:
        self._ended = ended
        self._runs: queue.Queue[Run | None] = queue.Queue(maxsize=2 * threads)
        self._threads = [
            threading.Thread(target=self._work, name=f"store-write-{number}", daemon=True) for number in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, run: Run) -> None:
        self._runs.put(run)

    def close(self) -> None:
        for _ in self._threads:
            self._runs.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (run := self._runs.get()) is not None:
            failure: Exception | None = None
            try:
                for buffer in run.buffers:
                    stamp_header(buffer.view[:HEADER_BYTES])
                run.segment.write([buffer.view for buffer in run.buffers], run.offset)
            except Exception as error:  # noqa: BLE001 - the boundary: one bad write must not end all writing (L13)
                failure = error
            self._ended(run, failure)


class NativeWrites(Writes):
    """C++ threads, over descriptors."""

    def __init__(self, library: RecordsLibrary, threads: int, ended: Ended) -> None:
        self._calls = library.free
        self._count = threads
        self._ended = ended
        self._tags = itertools.count()
        self._runs: dict[int, Run] = {}
        """Submitted and not ended: keeps the memory that is being written."""
        self._writers = ctypes.c_void_p()
        """The C++ threads, once started."""
        self._thread = threading.Thread(target=self._collect, name="store-written", daemon=True)

    def start(self) -> None:
        self._writers = ctypes.c_void_p(self._calls.headrace_writers_new(self._count, FIELD_BYTES))
        self._thread.start()

    def submit(self, run: Run) -> None:
        records = array("Q", [buffer.address for buffer in run.buffers])
        sizes = array("Q", [buffer.size for buffer in run.buffers])
        tag = next(self._tags)
        self._runs[tag] = run
        self._calls.headrace_writers_submit(
            self._writers,
            tag,
            run.segment.descriptor,
            run.offset,
            len(records),
            records.buffer_info()[0],
            sizes.buffer_info()[0],
        )

    def close(self) -> None:
        self._calls.headrace_writers_close(self._writers)

    def join(self) -> None:
        self._thread.join()

    def _collect(self) -> None:
        outcomes = (Outcome * _MOST)()
        collect = self._calls.headrace_writers_collect
        while count := collect(self._writers, outcomes, _LEAST, _MOST):
            for outcome in outcomes[:count]:
                failure = OSError(outcome.error, os.strerror(outcome.error)) if outcome.error else None
                try:
                    self._ended(self._runs.pop(outcome.tag), failure)
                except Exception:  # noqa: BLE001 - the boundary: one bad run must not end all writing (L13)
                    _log.exception("a run of records ended badly")
        self._calls.headrace_writers_free(self._writers)


def open_writes(files: FileLayer, threads: int, ended: Ended) -> Writes:
    """The faster kind that works over these files. Over all of them payloads are copied by the library (copies.py),
    so it is asked for here, at the store's start: the first put would wait for its compiler."""
    library = records_library()
    if library is None or not files.descriptors:
        return ThreadWrites(threads, ended)
    return NativeWrites(library, threads, ended)
