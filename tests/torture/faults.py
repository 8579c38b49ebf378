"""A disk that answers with errors: full, or broken now and then."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence

from headrace.kvcache.store.files import FileLayer, StoreFile
from tests.torture.disk import PowerDisk

Fault = Callable[[str, int], None]
"""Told the name of a call and its bytes before it happens; raises an OSError to make it fail."""


def no_fault(_call: str, _size: int) -> None:
    """A healthy disk."""


class FaultyDisk(FileLayer):
    """Every call of `inner` first asks `fault`. A failed write has landed in part, and a failed sync has dropped some
    of what it was to sync while later syncs say nothing of it, as Linux does."""

    def __init__(self, inner: PowerDisk, rng: random.Random) -> None:
        self.inner = inner
        self.fault: Fault = no_fault
        self.rng = rng

    def create(self, path: str, *, direct: bool) -> StoreFile:
        self.fault("create", 0)
        return _FaultyFile(self, self.inner.create(path, direct=direct))

    def open(self, path: str, *, direct: bool, writable: bool = False, deadline: float | None = None) -> StoreFile:
        self.fault("open", 0)
        return _FaultyFile(self, self.inner.open(path, direct=direct, writable=writable))

    def rename(self, source: str, target: str) -> None:
        self.fault("rename", 0)
        self.inner.rename(source, target)

    def unlink(self, path: str) -> None:
        self.fault("unlink", 0)
        self.inner.unlink(path)

    def rmdir(self, path: str) -> None:
        self.fault("rmdir", 0)
        self.inner.rmdir(path)

    def list(self, path: str) -> Sequence[str]:
        return self.inner.list(path)

    def sync_directory(self, path: str) -> None:
        self.fault("sync_directory", 0)
        self.inner.sync_directory(path)

    def free_bytes(self) -> int:
        return self.inner.free_bytes()

    def lock(self, path: str) -> StoreFile | None:
        return self.inner.lock(path)


class _FaultyFile(StoreFile):
    def __init__(self, disk: FaultyDisk, inner: StoreFile) -> None:
        self._disk, self._inner = disk, inner

    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            self._disk.fault("pwritev", sum(map(len, buffers)))
        except OSError:
            landed = buffers[: self._disk.rng.randint(0, len(buffers))]
            if landed:
                self._inner.pwritev(landed, offset)
            raise
        return self._inner.pwritev(buffers, offset)

    def preadv(self, buffers: Sequence[memoryview], offset: int, deadline: float | None = None) -> int:
        self._disk.fault("preadv", 0)
        return self._inner.preadv(buffers, offset)

    def datasync(self) -> None:
        try:
            self._disk.fault("datasync", 0)
        except OSError:
            self._disk.inner.drop_unsynced(self._inner, self._disk.rng)
            raise
        self._inner.datasync()

    def truncate(self, size: int) -> None:
        self._disk.fault("truncate", max(0, size - self._inner.size()))
        self._inner.truncate(size)

    def size(self) -> int:
        return self._inner.size()

    def close(self) -> None:
        self._inner.close()


def broken_now_and_then(rng: random.Random, share: float, calls: Sequence[str]) -> Fault:
    """EIO from that share of these calls."""

    def fault(call: str, size: int) -> None:
        if call in calls and rng.random() < share:
            raise OSError(errno.EIO, "a broken sector")

    return fault


class FullDisk:
    """A Fault: ENOSPC once that many bytes were taken, by writes or by files that grow."""

    def __init__(self, room: int, calls: Sequence[str] = ("truncate",)) -> None:
        self.room = room
        self.refused = 0
        self._calls = calls

    def __call__(self, call: str, size: int) -> None:
        if call not in self._calls:
            return
        if size > self.room:
            self.refused += 1
            raise OSError(errno.ENOSPC, "the disk is full")
        self.room -= size
