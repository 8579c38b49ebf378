"""The segment engine's FileLayer on a mounted 3FS.

Bytes go through USRBIO rings (connection.py); names through the mount, on threads that may hang (bounded.py). When the
mount is gone the breaker refuses every call at once (ENOTCONN: a miss, L17), and a keeper thread probes until it is
back, on new rings.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.files import FileLayer, StoreFile
from headrace.kvcache.store.threefs.abi import Library
from headrace.kvcache.store.threefs.bounded import BoundedCalls
from headrace.kvcache.store.threefs.breaker import State
from headrace.kvcache.store.threefs.connection import register
from headrace.kvcache.store.threefs.file import ThreeFsFile
from headrace.kvcache.store.threefs.locks import Holder, HostLocks, LockFile
from headrace.kvcache.store.threefs.mount import Mount
from headrace.kvcache.store.threefs.names import Names
from headrace.kvcache.store.threefs.ring import RingStats
from headrace.kvcache.store.threefs.settings import ThreeFsSettings

T = TypeVar("T")

_RETRY_S = 0.1


@dataclass(frozen=True)
class ThreeFsStats:
    state: State
    opened: int
    """How often the mount was taken for gone."""
    connections: int
    """Made since the start: 1 plus one for each time it came back."""
    reads: RingStats
    writes: RingStats
    name_calls: int
    """Name operations that run or hang now."""


class ThreeFsLayer(FileLayer):
    """A directory of a mounted 3FS as the store's root."""

    names_lag = True

    def __init__(
        self,
        root: str,
        settings: ThreeFsSettings | None = None,
        names: Names | None = None,
        *,
        owner: str = "",
        alive: Callable[[str], bool] | None = None,
    ) -> None:
        """Connects and probes. `owner` is this writer's `<node>-<boot>`, `alive` tells which owners run (locks.py).
        Raises StoreError, saying what to do, when the library or the mount is not there."""
        self.settings = settings or ThreeFsSettings()
        self.root = root
        self.library = Library(self.settings.library)
        self.names = names or Names()
        self._locks = HostLocks(root, self.names, owner, alive)
        self._calls = BoundedCalls(self.settings.name_threads, "3fs-names")
        # Of its own: many files close together, and nothing in the way of a request waits behind them.
        self._closings = BoundedCalls(1, "3fs-close")
        try:
            self.mount = Mount(root, self.settings, self.library, self.names, self._calls)
        except OSError as error:
            self._calls.close(0.0)
            self._closings.close(0.0)
            raise StoreError(
                f"{root} cannot be used as a 3FS directory ({error}); it must exist on a mount of type fuse.hf3fs "
                "whose 3fs-virt directory is visible, and be writable by this user"
            ) from error

    @property
    def stats(self) -> ThreeFsStats:
        connection = self.mount.connection
        return ThreeFsStats(
            self.mount.breaker.state,
            self.mount.breaker.opened,
            self.mount.connections,
            connection.reads.stats,
            connection.writes.stats,
            self._calls.busy + self._closings.busy,
        )

    # The FileLayer.

    def create(self, path: str, *, direct: bool) -> StoreFile:
        """`direct` changes nothing: USRBIO never passes the page cache. Waits up to `new_name_s` where the mount still
        denies a directory that another host has just made."""
        full = self._path(path)
        until = time.monotonic() + self.settings.new_name_s
        while True:
            connection = self.mount.connection
            try:
                fd = self.call(lambda: self._create(full), undo=self._discard)
                return ThreeFsFile(self, path, fd, connection, writable=True)
            except FileNotFoundError:
                if time.monotonic() >= until:
                    raise
            time.sleep(_RETRY_S)

    def open(self, path: str, *, direct: bool, writable: bool = False, deadline: float | None = None) -> StoreFile:
        connection = self.mount.connection
        fd = self.open_fd(path, os.O_RDWR if writable else os.O_RDONLY, deadline)
        return ThreeFsFile(self, path, fd, connection, writable=writable)

    def rename(self, source: str, target: str) -> None:
        self.call(lambda: self.names.rename(self._path(source), self._path(target)))

    def unlink(self, path: str) -> None:
        self.call(lambda: self.names.unlink(self._path(path)))

    def rmdir(self, path: str) -> None:
        self.call(lambda: self.names.rmdir(self._path(path)))

    def list(self, path: str) -> Sequence[str]:
        return self.call(lambda: self.names.list(self._path(path)))

    def sync_directory(self, path: str) -> None:
        """Nothing to do: a name operation of 3FS is a committed transaction of its metadata store when it returns."""

    def free_bytes(self) -> int:
        return self.call(lambda: self.names.free_bytes(self.root))

    def lock(self, path: str) -> StoreFile | None:
        """Exclusive among all hosts (locks.py), with a file at `path` for whoever lists locks. It survives a mount that
        comes back; when its process dies another takes it by evidence only."""
        full = self._path(path)
        holder = self.call(lambda: self._lock(full, path), undo=self._unlock)
        if holder is None:
            return None
        return LockFile(lambda: self._release_lock(holder), lambda: self.call(lambda: self._locks.holds(holder)))

    # What files use.

    def call(self, work: Callable[[], T], timeout_s: float | None = None, undo: Callable[[T], None] | None = None) -> T:
        """A name operation: refused while the breaker is open, and bounded."""
        return self.bounded(work, time.monotonic() + (timeout_s or self.settings.name_timeout_s), undo)

    def bounded(self, work: Callable[[], T], deadline: float, undo: Callable[[T], None] | None = None) -> T:
        return self.mount.watched(lambda: self._calls.run(work, deadline, undo), deadline)

    def open_fd(self, path: str, flags: int, deadline: float | None = None) -> int:
        """Open and register."""
        full = self._path(path)
        limit = time.monotonic() + self.settings.name_timeout_s
        deadline = limit if deadline is None else min(limit, deadline)
        return self.bounded(lambda: self._open(full, flags), deadline, undo=self._discard)

    def release_fd(self, fd: int) -> None:
        """Deregister and close without waiting: closing asks the mount."""
        self._closings.start(lambda: self._discard(fd))

    def close(self) -> None:
        """Stop the threads and give the rings back, if the mount lets us."""
        self._closings.close(self.settings.name_timeout_s)  # registered descriptors go before their rings
        self.mount.close()
        self._calls.close(1.0)

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path)

    def _open(self, full: str, flags: int) -> int:
        fd = self.names.open(full, flags)
        try:
            register(self.library, fd)
        except OSError:
            self.names.close(fd)
            raise
        return fd

    def _create(self, full: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            return self._open(full, flags)
        except FileNotFoundError:
            missing = os.path.relpath(os.path.dirname(full), self.root).split(os.sep)
            for depth in range(1, len(missing) + 1):
                self.names.mkdir(os.path.join(self.root, *missing[:depth]))
            return self._open(full, flags)

    def _lock(self, full: str, path: str) -> Holder | None:
        holder = self._locks.take(path)
        if holder is not None:
            try:
                self.names.mkdir(os.path.dirname(full))
                self.names.close(self.names.open(full, os.O_RDWR | os.O_CREAT))
            except OSError:
                self._locks.release(holder)
                raise
        return holder

    def _unlock(self, holder: Holder | None) -> None:
        if holder is not None:
            self._locks.release(holder)

    def _release_lock(self, holder: Holder) -> None:
        with contextlib.suppress(OSError):
            self.call(lambda: self._locks.release(holder))
            return
        self._closings.start(lambda: self._locks.release(holder))

    def _discard(self, fd: int | None) -> None:
        if fd is None:
            return
        self.library.deregister(fd)
        self.names.close(fd)
