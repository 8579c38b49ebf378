"""A disk whose power can fail: what was not synced is kept or lost piece by piece, torn at its sectors.

Harsher than a journaling file system: every write since a file's last datasync is kept sector by sector at random, and
every name made, renamed or removed since a directory's last sync is kept or not, whatever the order.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Sequence

from headrace.kvcache.store.files import FileLayer, StoreFile

PAGE = 4096


def _error(number: int, path: str) -> OSError:
    return OSError(number, errno.errorcode[number], path)


class _Inode:
    """A file's bytes as readers see them, and what of them is sure."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.sure = bytearray()
        self.since: list[tuple[int, bytes] | int] = []
        """Since the last sync: (offset, bytes), or a new size."""

    def write(self, offset: int, data: bytes) -> None:
        _put(self.seen, offset, data)
        self.since.append((offset, data))

    def resize(self, size: int) -> None:
        _resize(self.seen, size)
        self.since.append(size)

    def sync(self) -> None:
        self.sure = bytearray(self.seen)
        self.since.clear()

    def survive(self, keep: Callable[[], bool], sector: int) -> _Inode:
        left = _Inode()
        left.sure = bytearray(self.sure)
        for change in self.since:
            if isinstance(change, int):
                if keep():
                    _resize(left.sure, change)
                continue
            offset, data = change
            for start in range(0, len(data), sector):
                if keep():
                    _put(left.sure, offset + start, data[start : start + sector])
        left.seen = bytearray(left.sure)
        return left


class _Directory:
    def __init__(self) -> None:
        self.seen: dict[str, _Inode | _Directory] = {}
        self.sure: dict[str, _Inode | _Directory] = {}
        self.since: list[dict[str, _Inode | _Directory | None]] = []

    def change(self, names: dict[str, _Inode | _Directory | None]) -> None:
        _apply(self.seen, names)
        self.since.append(names)

    def sync(self) -> None:
        self.sure = dict(self.seen)
        self.since.clear()

    def survive(self, keep: Callable[[], bool], sector: int) -> _Directory:
        names = dict(self.sure)
        for change in self.since:
            if keep():
                _apply(names, change)
        left = _Directory()
        left.sure = {name: node.survive(keep, sector) for name, node in names.items()}
        left.seen = dict(left.sure)
        return left


class PowerDisk(FileLayer):
    """A FileLayer in memory. `cut_at` is the number of the change at which the power fails (None: never); from then on
    every call raises EIO, and `after_power_cut` is the disk of the next start. Thread-safe."""

    def __init__(self, cut_at: int | None = None, root: _Directory | None = None) -> None:
        self.lock_ = threading.RLock()
        self.off = False
        self.changes = 0
        self.cut_at = cut_at
        self.on_sync: Callable[[], None] = lambda: None
        """Called, under the disk's lock, when something became sure."""
        self._root = root or _Directory()
        self._locks: set[str] = set()

    def after_power_cut(self, rng: random.Random) -> PowerDisk:
        """What a machine finds that starts again; the power must be off."""
        assert self.off
        share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        sector = rng.choice([512, PAGE])
        with self.lock_:
            return PowerDisk(root=self._root.survive(lambda: rng.random() < share, sector))

    def drop_unsynced(self, file: StoreFile, rng: random.Random) -> None:
        """A sync of that file failed: pages that it was to write are given up; readers see what is left."""
        assert isinstance(file, _PowerFile)
        with self.lock_:
            file.inode.seen = file.inode.survive(lambda: rng.random() < 0.5, PAGE).seen
            file.inode.since.clear()

    def change(self) -> None:
        """One more change; raises EIO if it is the one at which the power fails. Holds the lock."""
        self.changes += 1
        if self.cut_at is not None and self.changes >= self.cut_at:
            self.off = True
        self.alive()

    def alive(self) -> None:
        if self.off:
            raise _error(errno.EIO, "the power is off")

    def create(self, path: str, *, direct: bool) -> StoreFile:
        with self.lock_:
            self.alive()
            directory, name = self._parent(path, make=True)
            if name in directory.seen:
                raise _error(errno.EEXIST, path)
            inode = _Inode()
            directory.change({name: inode})
            self.change()
            return _PowerFile(self, inode, path, direct=direct, writable=True)

    def open(self, path: str, *, direct: bool, writable: bool = False, deadline: float | None = None) -> StoreFile:
        with self.lock_:
            self.alive()
            node = self._find(path)
            if not isinstance(node, _Inode):
                raise _error(errno.ENOENT if node is None else errno.EISDIR, path)
            return _PowerFile(self, node, path, direct=direct, writable=writable)

    def rename(self, source: str, target: str) -> None:
        with self.lock_:
            self.alive()
            old, old_name = self._parent(source)
            new, new_name = self._parent(target)
            assert old is new, "the engine renames inside a directory only"
            if old_name not in old.seen:
                raise _error(errno.ENOENT, source)
            old.change({old_name: None, new_name: old.seen[old_name]})
            self.change()

    def unlink(self, path: str) -> None:
        with self.lock_:
            self.alive()
            directory, name = self._parent(path)
            if not isinstance(directory.seen.get(name), _Inode):
                raise _error(errno.ENOENT, path)
            directory.change({name: None})
            self.change()

    def rmdir(self, path: str) -> None:
        with self.lock_:
            self.alive()
            directory, name = self._parent(path)
            node = directory.seen.get(name)
            if not isinstance(node, _Directory):
                raise _error(errno.ENOENT, path)
            if node.seen:
                raise _error(errno.ENOTEMPTY, path)
            directory.change({name: None})
            self.change()

    def list(self, path: str) -> Sequence[str]:
        with self.lock_:
            self.alive()
            node = self._find(path)
            return sorted(node.seen) if isinstance(node, _Directory) else []

    def sync_directory(self, path: str) -> None:
        with self.lock_:
            self.change()
            node = self._find(path)
            if not isinstance(node, _Directory):
                raise _error(errno.ENOENT, path)
            node.sync()

    def free_bytes(self) -> int:
        return 1 << 40

    def lock(self, path: str) -> StoreFile | None:
        with self.lock_:
            self.alive()
            if path in self._locks:
                return None
            directory, name = self._parent(path, make=True)
            inode = directory.seen.get(name)
            if inode is None:
                inode = _Inode()
                directory.change({name: inode})
            assert isinstance(inode, _Inode)
            self._locks.add(path)
            return _PowerFile(self, inode, path, direct=False, writable=True, on_close=lambda: self._unlock(path))

    def _unlock(self, path: str) -> None:
        with self.lock_:
            self._locks.discard(path)

    def _find(self, path: str) -> _Inode | _Directory | None:
        node: _Inode | _Directory | None = self._root
        for part in filter(None, path.split("/")):
            node = node.seen.get(part) if isinstance(node, _Directory) else None
        return node

    def _parent(self, path: str, *, make: bool = False) -> tuple[_Directory, str]:
        directory = self._root
        *parts, name = path.split("/")
        for part in parts:
            node = directory.seen.get(part)
            if node is None and make:
                node = _Directory()
                directory.change({part: node})
            if not isinstance(node, _Directory):
                raise _error(errno.ENOENT, path)
            directory = node
        return directory, name


class _PowerFile(StoreFile):
    def __init__(
        self,
        disk: PowerDisk,
        inode: _Inode,
        path: str,
        *,
        direct: bool,
        writable: bool,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._disk, self.inode, self._path = disk, inode, path
        self._direct, self._writable, self._on_close = direct, writable, on_close

    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        if not self._writable:
            raise _error(errno.EBADF, self._path)
        self._check(buffers, offset)
        data = b"".join(buffers)
        with self._disk.lock_:
            self._disk.alive()
            self.inode.write(offset, data)  # of the last write before the cut, too, some sectors may be there
            self._disk.change()
        return len(data)

    def preadv(self, buffers: Sequence[memoryview], offset: int, deadline: float | None = None) -> int:
        self._check(buffers, offset)
        with self._disk.lock_:
            self._disk.alive()
            data = bytes(self.inode.seen[offset : offset + sum(map(len, buffers))])
        done = 0
        for buffer in buffers:
            piece = data[done : done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done

    def datasync(self) -> None:
        with self._disk.lock_:
            self._disk.change()
            self.inode.sync()
            self._disk.on_sync()

    def truncate(self, size: int) -> None:
        with self._disk.lock_:
            self._disk.alive()
            self.inode.resize(size)
            self._disk.change()

    def size(self) -> int:
        with self._disk.lock_:
            self._disk.alive()
            return len(self.inode.seen)

    def close(self) -> None:
        self._on_close()

    def _check(self, buffers: Sequence[memoryview], offset: int) -> None:
        if self._direct and (offset % PAGE or any(len(buffer) % PAGE for buffer in buffers)):
            raise _error(errno.EINVAL, self._path)


def _put(target: bytearray, offset: int, data: bytes) -> None:
    if len(target) < offset:
        _resize(target, offset)
    target[offset : offset + len(data)] = data


def _resize(target: bytearray, size: int) -> None:
    if size < len(target):
        del target[size:]
    else:
        target.extend(bytes(size - len(target)))


def _apply(names: dict[str, _Inode | _Directory], change: dict[str, _Inode | _Directory | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node
