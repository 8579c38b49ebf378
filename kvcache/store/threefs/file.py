"""One open file on 3FS."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headrace.kvcache.store.files import StoreFile
from headrace.kvcache.store.threefs.connection import Connection

if TYPE_CHECKING:
    from headrace.kvcache.store.threefs.layer import ThreeFsLayer


class _Handle:
    """A registered descriptor of one connection. It is released when it was dropped and no call is inside any more, so
    that its number cannot come to mean another file under a call. Guarded by the file's lock."""

    __slots__ = ("connection", "dropped", "fd", "users")

    def __init__(self, fd: int, connection: Connection) -> None:
        self.fd = fd
        self.connection = connection
        self.users = 0
        self.dropped = False


class ThreeFsFile(StoreFile):
    """Thread-safe."""

    def __init__(self, layer: ThreeFsLayer, path: str, fd: int, connection: Connection, *, writable: bool) -> None:
        self._layer = layer
        self._path = path
        self._writable = writable
        self._lock = threading.Lock()
        self._handle = _Handle(fd, connection)
        self._closed = False
        self._spoiled = False

    def preadv(self, buffers: Sequence[memoryview], offset: int, deadline: float | None = None) -> int:
        """ENODATA where the file has a hole with data behind it; fewer bytes at its end, or where what was asked ends
        in a hole. After a reconnection the file is opened again by its path."""
        if deadline is None:
            deadline = time.monotonic() + self._layer.settings.io_timeout_s
        if self._handle.connection is not self._layer.mount.connection:
            self._reopen(deadline)
        with self._use() as handle:
            reads, mount = handle.connection.reads, self._layer.mount
            return mount.watched(lambda: reads.transfer(handle.fd, buffers, offset, deadline), deadline)

    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        """After a failure the file takes no more writes (ESTALE): a write that got no answer may land at any time."""
        if self._spoiled:
            raise OSError(errno.ESTALE, f"an earlier write to {self._path} may still land; go on in another file")
        deadline = time.monotonic() + self._layer.settings.io_timeout_s
        try:
            with self._use(live=True) as handle:
                writes = handle.connection.writes
                return self._layer.mount.watched(
                    lambda: writes.transfer(handle.fd, buffers, offset, deadline), deadline
                )
        except OSError:
            self._spoiled = True
            raise

    def datasync(self) -> None:
        with self._use(live=True) as handle:
            self._layer.call(lambda: self._layer.names.datasync(handle.fd), self._layer.settings.sync_timeout_s)

    def truncate(self, size: int) -> None:
        with self._use(live=True) as handle:
            self._layer.call(lambda: self._layer.names.truncate(handle.fd, size))

    def size(self) -> int:
        """As the mount says, which may be 30 s old: never what decides where data ends."""
        with self._use() as handle:
            return self._layer.call(lambda: self._layer.names.size(handle.fd))

    def close(self) -> None:
        """Idempotent; never waits for the mount."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            gone = self._drop(self._handle)
        self._release(gone)

    @contextlib.contextmanager
    def _use(self, *, live: bool = False) -> Iterator[_Handle]:
        """Keep the descriptor while a call is inside. `live`: refuse (ESTALE) when the mount was replaced since."""
        with self._lock:
            handle = self._handle
            if self._closed:
                raise OSError(errno.EBADF, f"{self._path} is closed")
            if live and handle.connection is not self._layer.mount.connection:
                raise OSError(errno.ESTALE, f"the mount was replaced after {self._path} was opened")
            handle.users += 1
        try:
            yield handle
        finally:
            with self._lock:
                handle.users -= 1
                gone = handle.fd if handle.dropped and handle.users == 0 else None
            self._release(gone)

    def _reopen(self, deadline: float) -> None:
        connection = self._layer.mount.connection
        fd = self._layer.open_fd(self._path, os.O_RDWR if self._writable else os.O_RDONLY, deadline)
        with self._lock:
            if self._closed or self._handle.connection is connection:  # another call was faster
                gone: int | None = fd
            else:
                gone = self._drop(self._handle)
                self._handle = _Handle(fd, connection)
        self._release(gone)

    def _drop(self, handle: _Handle) -> int | None:
        """No new call uses it (lock held); the descriptor to release now, if no call is inside."""
        handle.dropped = True
        return handle.fd if handle.users == 0 else None

    def _release(self, fd: int | None) -> None:
        if fd is not None:
            self._layer.release_fd(fd)
