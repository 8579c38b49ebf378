"""The few file operations that the segment engine uses, as a seam: the real ones, and in tests layers that tear writes,
lose what was not synced, fill up, lag like a network mount, or record what a crash would leave.

Paths are relative to the store's root, with "/" between parts. Every call may raise OSError; `miss_of` says which miss
a failed read is (L17). A local disk answers when it answers; a network mount (threefs/) may take a minute, so the two
calls in the way of a request, `open` and `preadv`, carry that request's deadline (time.monotonic seconds): a layer that
can keep it raises TimeoutError by then, and what completes later never touches the caller's buffers.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Sequence

from headrace.kvcache.entries import Miss

_MISSES = {
    errno.ENOENT: Miss.ABSENT,
    errno.ETIMEDOUT: Miss.TIMEOUT,
    errno.EBUSY: Miss.BUSY,
    errno.EAGAIN: Miss.BUSY,
    errno.ENODATA: Miss.HOLE,
    errno.ENOTCONN: Miss.NOT_CONNECTED,
    errno.ECONNABORTED: Miss.NOT_CONNECTED,
    errno.ESHUTDOWN: Miss.NOT_CONNECTED,
    errno.EHOSTDOWN: Miss.NOT_CONNECTED,
    errno.EREMOTEIO: Miss.NOT_CONNECTED,
    errno.ENODEV: Miss.NOT_CONNECTED,
    errno.ESTALE: Miss.NOT_CONNECTED,
}


def miss_of(error: OSError) -> Miss:
    """Which miss a failed read counts as. ENODATA is a hole (3FS with holes forbidden), EBUSY a layer without a free
    buffer, EREMOTEIO an RPC that failed behind a mount; what is not in the table is the server's or disk's own error.
    ENOENT says only that a name was not seen: a mount may remember that for seconds after the file was made."""
    return _MISSES.get(error.errno or 0, Miss.SERVER)


class StoreFile(ABC):
    """An open file."""

    @abstractmethod
    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes written (may be short). With O_DIRECT, buffers, sizes and offset are multiples of 4,096. After an
        OSError the bytes may still land later: nothing else is ever written to that place; the writer goes on in
        another file."""

    @property
    def descriptor(self) -> int:
        """Of a layer with `descriptors`."""
        raise AttributeError(f"a {type(self).__name__} is no file descriptor")

    @abstractmethod
    def preadv(self, buffers: Sequence[memoryview], offset: int, deadline: float | None = None) -> int:
        """Bytes read; fewer than asked at the end of the file (and, on 3FS, where a hole reaches to the end of what
        was asked). None waits as long as the layer does by itself. Local files ignore the deadline."""

    @abstractmethod
    def datasync(self) -> None: ...

    @abstractmethod
    def truncate(self, size: int) -> None:
        """Set the size; growing preallocates where the file system can."""

    @abstractmethod
    def size(self) -> int: ...

    def held(self) -> bool:
        """Of a lock: whether it is still held. One that others may take from a process that they have evidence to think
        dead (several hosts, a registry) can be lost. OSError if that cannot be told."""
        return True

    @abstractmethod
    def close(self) -> None: ...


class FileLayer(ABC):
    """A root directory."""

    descriptors: bool = False
    """Its files are file descriptors (`StoreFile.descriptor`), and a pwritev of one is all that a write is: it may be
    done elsewhere than in StoreFile.pwritev."""
    names_lag: bool = False
    """A file that another host has made may be denied for a while (a mount that remembers missing names): ENOENT is
    then no evidence that it is gone."""

    @abstractmethod
    def create(self, path: str, *, direct: bool) -> StoreFile:
        """A new file for writing and reading; its directories are made. FileExistsError if it is there."""

    @abstractmethod
    def open(self, path: str, *, direct: bool, writable: bool = False, deadline: float | None = None) -> StoreFile:
        """An existing file."""

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Atomic; replaces the target."""

    @abstractmethod
    def unlink(self, path: str) -> None: ...

    @abstractmethod
    def rmdir(self, path: str) -> None: ...

    @abstractmethod
    def list(self, path: str) -> Sequence[str]:
        """Names in a directory; empty if it is not there."""

    @abstractmethod
    def sync_directory(self, path: str) -> None: ...

    @abstractmethod
    def free_bytes(self) -> int: ...

    @abstractmethod
    def lock(self, path: str) -> StoreFile | None:
        """An exclusive lock on a file (flock), held until the returned file is closed; None when another has it."""

    def close(self) -> None:  # noqa: B027 - most layers hold nothing
        """Give back what the layer itself holds, after its files are closed. Idempotent."""
