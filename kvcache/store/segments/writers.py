"""Who writes into a store: one lock file per process, held while it lives.

A writer is dead only by evidence: its lock can be taken and, where the service knows better (a registry lease), it is
said not to run. Never by a file's age or size (spec/kv_tier.md, Recovery).
"""

from __future__ import annotations

import contextlib

from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.files import FileLayer, StoreFile
from headrace.kvcache.store.segments.names import LOCKS
from headrace.kvcache.store.segments.settings import Liveness

_SUFFIX = ".lock"


def lock_path(writer: str) -> str:
    return f"{LOCKS}/{writer}{_SUFFIX}"


class WriterLock:
    """A held lock of one writer: the own one, or a dead one's while its segments are adopted."""

    def __init__(self, files: FileLayer, writer: str, file: StoreFile) -> None:
        self.writer = writer
        self._files = files
        self._file = file

    @property
    def held(self) -> bool:
        """Whether it is still ours. OSError if that cannot be told."""
        return self._file.held()

    def release(self, *, settled: bool) -> None:
        """Let go. `settled`: everything this writer made durable is sealed and in the index, so that nobody needs to
        look at it again; else the lock file stays and says that somebody must."""
        if settled:
            # On a disk that fails now the name stays: somebody will look in vain.
            with contextlib.suppress(OSError):
                self._files.unlink(lock_path(self.writer))
        self._file.close()


def become(files: FileLayer, writer: str) -> WriterLock:
    """Take the own lock, durably: a store never holds a segment of a writer that it has not heard of. StoreError if
    another living process has this name."""
    file = files.lock(lock_path(writer))
    if file is None:
        raise StoreError(f"writer {writer} runs already; every process needs a boot id of its own")
    files.sync_directory(LOCKS)
    return WriterLock(files, writer, file)


def known_writers(files: FileLayer) -> tuple[str, ...]:
    """Every writer that lives, or died without settling."""
    return tuple(name.removesuffix(_SUFFIX) for name in files.list(LOCKS) if name.endswith(_SUFFIX))


def take_over(files: FileLayer, writer: str, liveness: Liveness | None) -> WriterLock | None:
    """The lock of a dead writer, or None if it lives or somebody else is taking it over."""
    if liveness is not None and liveness(writer):
        return None
    file = files.lock(lock_path(writer))
    return WriterLock(files, writer, file) if file is not None else None
