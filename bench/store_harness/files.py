"""One file per block: what a store without segments does."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

_FANOUT = 16


def names(directory: Path, count: int) -> list[Path]:
    """Where the blocks lie: a few directories, since one with all names is slower."""
    for number in range(_FANOUT):
        (directory / f"{number:x}").mkdir(parents=True, exist_ok=True)
    return [directory / f"{number % _FANOUT:x}" / f"{number}" for number in range(count)]


def write(paths: Sequence[Path], record: int, threads: int) -> float:
    """Seconds to write every file and make it and its name durable."""

    def one(path: Path, view: memoryview) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        if os.pwrite(descriptor, view, 0) != record:
            raise OSError(f"short write of {path}")
        os.fdatasync(descriptor)
        os.close(descriptor)

    started = time.perf_counter()
    _each(paths, record, threads, one)
    for directory in {path.parent for path in paths}:
        descriptor = os.open(directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - started


def read(paths: Sequence[Path], record: int, threads: int) -> float:
    """Seconds to read every file."""

    def one(path: Path, view: memoryview) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        if os.preadv(descriptor, [view], 0) != record:
            raise OSError(f"short read of {path}")
        os.close(descriptor)

    started = time.perf_counter()
    _each(paths, record, threads, one)
    return time.perf_counter() - started


def free(paths: Sequence[Path]) -> float:
    """Seconds to unlink every file."""
    started = time.perf_counter()
    for path in paths:
        path.unlink()
    return time.perf_counter() - started


def _each(paths: Sequence[Path], record: int, threads: int, one: Callable[[Path, memoryview], None]) -> None:
    own = local()

    def work(path: Path) -> None:
        if not hasattr(own, "view"):
            own.view = memoryview(mmap.mmap(-1, record, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        one(path, own.view)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, paths))
