"""The disk itself: preadv, pwritev and fdatasync with O_DIRECT, at given places, from a few threads."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock


@dataclass(frozen=True)
class Run:
    """Records that lie one behind the other and are moved by one system call."""

    file: Path
    offset: int
    records: int


def runs_of(places: Sequence[tuple[Path, int]], record: int, most_bytes: int) -> list[Run]:
    """Neighbouring records up to `most_bytes` together (at least one), as the engine joins them."""
    runs: list[Run] = []
    for file, offset in places:
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.file == file
            and last.offset + last.records * record == offset
            and (last.records + 1) * record <= most_bytes
        ):
            runs[-1] = Run(file, last.offset, last.records + 1)
        else:
            runs.append(Run(file, offset, 1))
    return runs


def preallocate(file: Path, size: int) -> None:
    """A file with its space taken and nothing written, as a new segment is."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.posix_fallocate(descriptor, 0, size)
    os.fsync(descriptor)
    os.close(descriptor)


def read(runs: Sequence[Run], record: int, threads: int) -> float:
    """Seconds to read all runs."""
    return _move(runs, record, threads, os.O_RDONLY, os.preadv, sync_bytes=0)


def write(runs: Sequence[Run], record: int, threads: int, sync_bytes: int) -> float:
    """Seconds to write all runs and make them durable: whoever completes another `sync_bytes` syncs, while the others
    write on, and all is synced at the end."""
    return _move(runs, record, threads, os.O_RDWR, os.pwritev, sync_bytes=sync_bytes)


def _move(
    runs: Sequence[Run],
    record: int,
    threads: int,
    flags: int,
    call: Callable[[int, list[memoryview], int], int],
    *,
    sync_bytes: int,
) -> float:
    files = {file: os.open(file, flags | os.O_DIRECT) for file in {run.file for run in runs}}
    most = max(run.records for run in runs)
    buffers = _buffers(threads, most, record)
    queue = iter(runs)
    lock = Lock()

    def take() -> Iterator[Run]:
        while True:
            with lock:
                taken = list(islice(queue, 1))
            if not taken:
                return
            yield taken[0]

    moved = 0

    def crossed(size: int) -> bool:
        nonlocal moved
        with lock:
            before, moved = moved, moved + size
            return bool(sync_bytes) and moved // sync_bytes > before // sync_bytes

    def work(views: list[memoryview]) -> None:
        for run in take():
            done = call(files[run.file], views[: run.records], run.offset)
            if done != run.records * record:
                raise OSError(f"{done} of {run.records * record} bytes at {run.offset} of {run.file}")
            if crossed(done):
                os.fdatasync(files[run.file])

    try:
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            list(pool.map(work, buffers))
            if sync_bytes:
                for descriptor in files.values():
                    os.fdatasync(descriptor)
            return time.perf_counter() - started
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def _buffers(threads: int, records: int, record: int) -> list[list[memoryview]]:
    """A piece of memory per record for every thread, in huge pages where the kernel has some, and touched before
    anything is timed: as good as memory for direct IO can be."""
    memory = mmap.mmap(-1, threads * records * record, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    for start in range(0, len(view), 4096):
        view[start] = 1
    pieces = [view[start : start + record] for start in range(0, len(view), record)]
    return [pieces[start : start + records] for start in range(0, len(pieces), records)]
