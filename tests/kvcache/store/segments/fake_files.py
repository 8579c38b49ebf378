"""File layers for tests: the real one, with reads that wait, calls that fail, or no O_DIRECT."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

from headrace.kvcache.store.files import StoreFile
from headrace.kvcache.store.files_posix import PosixFileLayer


class FakeFile(StoreFile):
    """A file whose reads pass a gate and are counted."""

    def __init__(self, file: StoreFile, layer: FakeLayer) -> None:
        self._file = file
        self._layer = layer

    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._file.pwritev(buffers, offset)

    def preadv(self, buffers: Sequence[memoryview], offset: int, deadline: float | None = None) -> int:
        self._layer.reading.release()
        self._layer.gate.wait()
        count = self._file.preadv(buffers, offset, deadline)
        self._layer.reads.append((offset, count))
        return count

    def datasync(self) -> None:
        self._file.datasync()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()


class FakeLayer(PosixFileLayer):
    """`gate` shut: reads of segments wait. `reading` is released once for each read that has begun."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Semaphore(0)
        self.reads: list[tuple[int, int]] = []

    def open(self, path: str, *, direct: bool, writable: bool = False, deadline: float | None = None) -> StoreFile:
        file = super().open(path, direct=direct, writable=writable, deadline=deadline)
        return FakeFile(file, self) if path.endswith(".seg") else file


class BufferedLayer(PosixFileLayer):
    """A file system without O_DIRECT."""

    def create(self, path: str, *, direct: bool) -> StoreFile:
        if direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return super().create(path, direct=direct)

    def open(self, path: str, *, direct: bool, writable: bool = False, deadline: float | None = None) -> StoreFile:
        if direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return super().open(path, direct=direct, writable=writable, deadline=deadline)
