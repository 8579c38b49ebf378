"""Open segments for reading: shared by readers, kept a while, never pulled from under a reader."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from headrace.kvcache.store.files import FileLayer, StoreFile

_log = logging.getLogger(__name__)
GRACE_S = 30.0
"""How long a reader keeps a segment from being unlinked (L4: afterwards it gets a verified miss)."""
IDLE_S = 10.0
"""A file that nobody read for so long is closed: an open one keeps the space of a segment that another process
unlinked."""


class Handle:
    """An open segment and how many reads are using it."""

    __slots__ = ("file", "last_used", "path", "readers")

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: StoreFile | None = None
        self.readers = 0
        self.last_used = 0.0


class SegmentFiles:
    """Thread-safe. Opening is outside the lock: a slow mount delays only who needs that file."""

    def __init__(
        self, files: FileLayer, limit: int, *, direct: bool, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = files
        self._limit = limit
        self._direct = direct
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, Handle] = OrderedDict()
        self._condemned: dict[str, float] = {}
        """Path → when it was condemned; nobody starts to read it any more."""

    def pin(self, path: str) -> Handle | None:
        """Count a reader, who calls `unpin` once; None if the segment is condemned. Opens nothing."""
        with self._lock:
            if path in self._condemned:
                return None
            handle = self._handles.get(path)
            if handle is None:
                handle = self._handles[path] = Handle(path)
            self._handles.move_to_end(path)
            handle.readers += 1
            return handle

    def open(self, handle: Handle, deadline: float) -> StoreFile:
        """The file of a pinned handle. OSError if it cannot be opened, as when its segment is gone."""
        file = handle.file
        if file is not None:
            return file
        file = self._files.open(handle.path, direct=self._direct, deadline=deadline)
        with self._lock:
            if handle.file is None:
                handle.file = file
                return file
            kept = handle.file
        file.close()
        return kept

    def unpin(self, handle: Handle) -> None:
        closing: list[StoreFile] = []
        with self._lock:
            handle.readers -= 1
            handle.last_used = self._monotonic()
            kept = self._handles.get(handle.path) is handle
            if handle.readers == 0 and not kept and handle.file is not None:
                # Its segment was unlinked after 30 s, under the last reader.
                closing.append(handle.file)
                handle.file = None
            elif handle.readers == 0 and kept and handle.file is None:
                del self._handles[handle.path]
            if len(self._handles) > self._limit:
                closing += self._drop(lambda _: len(self._handles) > self._limit)
        for file in closing:
            file.close()

    def condemn(self, path: str) -> None:
        """The segment will be unlinked: at the next `reap` without readers, or once 30 s have passed. Its rows are out
        of the index already."""
        with self._lock:
            self._condemned.setdefault(path, self._monotonic())

    def reap(self) -> tuple[str, ...]:
        """Close idle files; the condemned paths that may be unlinked now. The caller unlinks and calls `gone`."""
        now = self._monotonic()
        with self._lock:
            ready = tuple(
                path
                for path, since in self._condemned.items()
                if now - since >= GRACE_S or path not in self._handles or self._handles[path].readers == 0
            )
            for path in ready:
                handle = self._handles.pop(path, None)
                if handle is not None and handle.readers == 0 and handle.file is not None:
                    handle.file.close()
                # A reader that outlived its time goes on with its own descriptor; POSIX keeps the bytes for it.
            closing = self._drop(lambda handle: now - handle.last_used >= IDLE_S)
        for file in closing:
            file.close()
        return ready

    def gone(self, path: str) -> None:
        """It is unlinked; paths are never used twice."""
        with self._lock:
            self._condemned.pop(path, None)

    def readers(self) -> int:
        """Reads that have a file pinned now."""
        with self._lock:
            return sum(handle.readers for handle in self._handles.values())

    def condemned(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._condemned)

    def close(self) -> None:
        """Readers are gone."""
        with self._lock:
            closing = self._drop(lambda _: True)
        for file in closing:
            file.close()

    def _drop(self, wanted: Callable[[Handle], bool]) -> list[StoreFile]:
        """Forget unread handles, least recently used first; their files are closed outside the lock."""
        closing = []
        for path, handle in list(self._handles.items()):
            if handle.readers == 0 and handle.file is not None and wanted(handle):
                del self._handles[path]
                closing.append(handle.file)
                handle.file = None
        return closing
