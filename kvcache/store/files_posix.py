"""The real file layer: a directory of a local or mounted file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.kvcache.store.files import FileLayer, StoreFile

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_ATTEMPTS = 16


class PosixFile(StoreFile):
    """A file descriptor. Closing twice is harmless."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        written = 0
        for start in range(0, len(buffers), _IOV_MAX):
            part = buffers[start : start + _IOV_MAX]
            count = os.pwritev(self._descriptor, part, offset + written)
            written += count
            if count < sum(map(len, part)):
                break
        return written

    def preadv(self, buffers: Sequence[memoryview], offset: int, deadline: float | None = None) -> int:
        read = 0
        for start in range(0, len(buffers), _IOV_MAX):
            part = buffers[start : start + _IOV_MAX]
            count = os.preadv(self._descriptor, part, offset + read)
            read += count
            if count < sum(map(len, part)):
                break
        return read

    def datasync(self) -> None:
        os.fdatasync(self._descriptor)

    def truncate(self, size: int) -> None:
        """Growing takes the space now, so that a full disk is found before a record is promised, and so that a write
        into it changes no size; where the file system cannot, the file grows without blocks."""
        now = os.fstat(self._descriptor).st_size
        if size > now:
            try:
                os.posix_fallocate(self._descriptor, now, size - now)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
            else:
                return
        os.ftruncate(self._descriptor, size)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class PosixFileLayer(FileLayer):
    """Files below `root`, which is made if it is not there. Deadlines are not kept: a local disk answers when it
    answers, and the caller of a read gives up by itself."""

    descriptors = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prefix = f"{root}/"
        root.mkdir(parents=True, exist_ok=True)

    def create(self, path: str, *, direct: bool) -> StoreFile:
        target = self._at(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            return PosixFile(_in_directory(target, lambda: os.open(target, flags, 0o600)))
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                # Linux makes the file before it finds that the file system knows no O_DIRECT.
                with contextlib.suppress(FileNotFoundError):
                    target.unlink()
            raise

    def open(self, path: str, *, direct: bool, writable: bool = False, deadline: float | None = None) -> StoreFile:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        return PosixFile(os.open(self._prefix + path, flags))  # without a Path: every write and read comes here

    def rename(self, source: str, target: str) -> None:
        os.rename(self._at(source), self._at(target))

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def list(self, path: str) -> Sequence[str]:
        try:
            return sorted(os.listdir(self._at(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self) -> int:
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def lock(self, path: str) -> StoreFile | None:
        target = self._at(path)
        for _ in range(_ATTEMPTS):
            descriptor = _in_directory(target, lambda: os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever held it may have unlinked the name between our open and our lock: a lock without a name is
                # no lock.
                if os.fstat(descriptor).st_nlink:
                    return PosixFile(descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)
        return None

    def _at(self, path: str) -> Path:
        return self.root / path


def _in_directory(target: Path, make: Callable[[], int]) -> int:
    """Make a file and its directories; another process may be removing an empty one just now."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            target.parent.mkdir(parents=True, exist_ok=True)
            return make()
    return make()
