"""A file system that plays 3FS's moods in memory: one server, and a mount of each host with a memory of its own.

The mount remembers a missing name for 5 s and a size for 30 s, by an injected clock. A file is chunks as long as their
last written byte; a read with a gap before bytes is ENODATA, a gap at its end is short. I/O can fail, come short, find
no answer (a write that finds none lands later, or never), and the mount can vanish.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.kvcache.store.files import FileLayer, StoreFile

NEGATIVE_S = 5.0
SIZE_S = 30.0


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class _Data:
    def __init__(self) -> None:
        self.chunks: dict[int, bytearray] = {}
        self.length = 0


class Server:
    """What all mounts see in the end. Thread-safe."""

    def __init__(self, chunk_bytes: int = 1 << 15) -> None:
        self.chunk_bytes = chunk_bytes
        self.lock = threading.RLock()
        self.files: dict[str, _Data] = {}
        self.directories: set[str] = {""}
        self.held: dict[str, StoreFile] = {}

    def write(self, data: _Data, offset: int, content: bytes) -> None:
        for at in range(0, len(content), 512):
            part = content[at : at + 512]
            chunk, inside = divmod(offset + at, self.chunk_bytes)
            target = data.chunks.setdefault(chunk, bytearray())
            target.extend(bytes(max(0, inside + len(part) - len(target))))
            target[inside : inside + len(part)] = part
        data.length = max(data.length, offset + len(content))

    def read(self, data: _Data, offset: int, size: int) -> bytes:
        out = bytearray()
        gap = False
        at = offset
        while at < offset + size:
            chunk, inside = divmod(at, self.chunk_bytes)
            stop = min(offset + size, (chunk + 1) * self.chunk_bytes)
            part = data.chunks.get(chunk, bytearray())[inside : inside + stop - at]
            if part and gap:
                raise error(errno.ENODATA, "a hole")
            out += part
            gap = gap or len(part) < stop - at
            at = stop
        return bytes(out)


@dataclass
class Moods:
    """What a mount does to calls, each a chance in [0, 1]."""

    read_errors: float = 0.0
    read_timeouts: float = 0.0
    read_busy: float = 0.0
    read_short: float = 0.0
    write_errors: float = 0.0
    write_timeouts: float = 0.0
    sync_errors: float = 0.0
    name_timeouts: float = 0.0
    gone: bool = False
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def happens(self, chance: float) -> bool:
        return chance > 0 and self.random.random() < chance


class HostileFile(StoreFile):
    def __init__(self, mount: HostileMount, path: str, data: _Data) -> None:
        self._mount = mount
        self._path = path
        self._data = data
        self._spoiled = False

    def preadv(self, buffers: Sequence[memoryview], offset: int, deadline: float | None = None) -> int:
        mount, moods = self._mount, self._mount.moods
        mount.check()
        for chance, number in (
            (moods.read_errors, errno.EIO),
            (moods.read_timeouts, errno.ETIMEDOUT),
            (moods.read_busy, errno.EBUSY),
        ):
            if moods.happens(chance):
                raise error(number, self._path)
        if self._path in mount.broken:
            raise error(mount.broken[self._path], self._path)
        with mount.server.lock:
            content = mount.server.read(self._data, offset, sum(map(len, buffers)))
        if moods.happens(moods.read_short):
            content = content[: len(content) // 2]
        done = 0
        for buffer in buffers:
            part = content[done : done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
        return done

    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        mount, moods = self._mount, self._mount.moods
        mount.check()
        if self._spoiled:
            raise error(errno.ESTALE, self._path)
        content = b"".join(buffers)
        if moods.happens(moods.write_errors):
            self._spoiled = True
            raise error(errno.EIO, self._path)
        if moods.happens(moods.write_timeouts):
            self._spoiled = True
            mount.late.append(lambda: mount.server.write(self._data, offset, content))
            raise error(errno.ETIMEDOUT, self._path)
        with mount.server.lock:
            mount.server.write(self._data, offset, content)
        return len(content)

    def datasync(self) -> None:
        self._mount.check()
        if self._mount.moods.happens(self._mount.moods.sync_errors):
            raise error(errno.EIO, self._path)

    def truncate(self, size: int) -> None:
        self._mount.check()
        server = self._mount.server
        with server.lock:
            for chunk in list(self._data.chunks):
                keep = max(0, min(server.chunk_bytes, size - chunk * server.chunk_bytes))
                if keep:
                    del self._data.chunks[chunk][keep:]
                else:
                    del self._data.chunks[chunk]
            self._data.length = size

    def size(self) -> int:
        self._mount.check()
        return self._mount.remembered_size(self._path, self._data)

    def close(self) -> None:
        pass


class _Lock(HostileFile):
    """Lost when the test takes its path out of `Server.held`, as if another host had evidence of death."""

    def held(self) -> bool:
        self._mount.check()
        return self._mount.server.held.get(self._path) is self

    def close(self) -> None:
        with self._mount.server.lock:
            if self._mount.server.held.get(self._path) is self:
                del self._mount.server.held[self._path]


class HostileMount(FileLayer):
    """One host's mount of `server`."""

    names_lag = True

    def __init__(self, server: Server, clock: Callable[[], float]) -> None:
        self.server = server
        self.moods = Moods()
        self.late: list[Callable[[], None]] = []
        """Writes without an answer: called, they land."""
        self.broken: dict[str, int] = {}
        """Files whose every read fails, with its errno."""
        self.fail_renames = False
        self._clock = clock
        self._denied: dict[str, float] = {}
        self._sizes: dict[str, tuple[float, int]] = {}

    def check(self) -> None:
        if self.moods.gone:
            raise error(errno.ENOTCONN, "the mount")

    def remembered_size(self, path: str, data: _Data) -> int:
        until, size = self._sizes.get(path, (0.0, 0))
        if self._clock() >= until:
            size = data.length
            self._sizes[path] = (self._clock() + SIZE_S, size)
        return size

    def create(self, path: str, *, direct: bool) -> StoreFile:
        self._ask()
        with self.server.lock:
            if path in self.server.files:
                raise error(errno.EEXIST, path)
            self._make_directories(path)
            self._forget(path)
            data = self.server.files[path] = _Data()
            return self._opened(path, data)

    def open(self, path: str, *, direct: bool, writable: bool = False, deadline: float | None = None) -> StoreFile:
        self._ask()
        return self._opened(path, self._find(path))

    def rename(self, source: str, target: str) -> None:
        self._ask()
        if self.fail_renames:
            raise error(errno.EIO, source)
        with self.server.lock:
            data = self._find(source)
            del self.server.files[source]
            self.server.files[target] = data
            self._forget(target)
            self._denied[source] = self._clock() + NEGATIVE_S

    def unlink(self, path: str) -> None:
        self._ask()
        with self.server.lock:
            self._find(path)
            del self.server.files[path]

    def rmdir(self, path: str) -> None:
        self._ask()
        with self.server.lock:
            if path not in self.server.directories:
                raise error(errno.ENOENT, path)
            if self._names(path):
                raise error(errno.ENOTEMPTY, path)
            self.server.directories.remove(path)

    def list(self, path: str) -> Sequence[str]:
        self._ask()
        with self.server.lock:
            if self._is_denied(path) or path not in self.server.directories:
                self._deny(path)
                return []
            return self._names(path)

    def sync_directory(self, path: str) -> None:
        self._ask()

    def free_bytes(self) -> int:
        return 1 << 40

    def lock(self, path: str) -> StoreFile | None:
        self._ask()
        with self.server.lock:
            if path in self.server.held:
                return None
            self._make_directories(path)
            lock = _Lock(self, path, self.server.files.setdefault(path, _Data()))
            self.server.held[path] = lock
            return lock

    def _ask(self) -> None:
        self.check()
        if self.moods.happens(self.moods.name_timeouts):
            raise error(errno.ETIMEDOUT, "the mount")

    def _opened(self, path: str, data: _Data) -> HostileFile:
        self.remembered_size(path, data)  # a lookup brings the attributes
        return HostileFile(self, path, data)

    def _find(self, path: str) -> _Data:
        with self.server.lock:
            data = None if self._is_denied(path) else self.server.files.get(path)
            if data is None:
                self._deny(path)
                raise error(errno.ENOENT, path)
            return data

    def _names(self, path: str) -> list[str]:
        start = f"{path}/" if path else ""
        known = [*self.server.files, *self.server.directories]
        return sorted({name[len(start) :].split("/")[0] for name in known if name.startswith(start) and name != path})

    def _deny(self, path: str) -> None:
        """Remember the first part of the path that is not there."""
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            part = "/".join(parts[:end])
            if part not in self.server.directories and part not in self.server.files:
                self._denied.setdefault(part, self._clock() + NEGATIVE_S)
                return

    def _is_denied(self, path: str) -> bool:
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            part = "/".join(parts[:end])
            if self._denied.get(part, 0.0) > self._clock():
                return True
            self._denied.pop(part, None)
        return False

    def _make_directories(self, path: str) -> None:
        parts = path.split("/")[:-1]
        for end in range(1, len(parts) + 1):
            self.server.directories.add("/".join(parts[:end]))
            self._forget("/".join(parts[:end]))

    def _forget(self, path: str) -> None:
        """What this host makes itself it sees at once."""
        self._denied.pop(path, None)
        self._sizes.pop(path, None)
