"""Exclusive locks between hosts, as entries of one directory: 3FS does not carry flock from mount to mount.

Whoever wants a lock makes an entry that says who he is, then lists: alone among the living he has it, else he takes
his entry away again. Of two who come together the one that lists last sees both, so never do two have it; both may
leave, and come again. An entry is dead only by evidence: its process is gone from this pid namespace, or the liveness
that the service was given (a registry lease) says that its owner is not running. Nobody's age or clock is asked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.kvcache.store.files import StoreFile
from headrace.kvcache.store.threefs.names import Names

FOLDER = "locks"
_held: set[str] = set()
"""Tokens of this process. An entry of ours that is not here was given back while the mount was gone."""
_held_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Holder:
    """What an entry's name says."""

    lock: str
    """Digest of the locked path."""
    owner: str
    """`<node>-<boot>` of the writer; empty: unknown."""
    host: str
    """Which kernel, since its boot."""
    space: str
    """Which pid namespace of that kernel."""
    pid: int
    started: str
    """When the process began, in the kernel's ticks: pids are used again."""
    token: str

    @property
    def name(self) -> str:
        return "~".join((self.lock, self.owner, self.host, self.space, str(self.pid), self.started, self.token))

    @staticmethod
    def parse(name: str) -> Holder | None:
        parts = name.split("~")
        if len(parts) != 7 or not parts[4].isdecimal():
            return None
        return Holder(parts[0], parts[1], parts[2], parts[3], int(parts[4]), parts[5], parts[6])


class HostLocks:
    """Calls may hang with the mount and raise OSError."""

    def __init__(self, root: str, names: Names, owner: str, alive: Callable[[str], bool] | None) -> None:
        self._folder = os.path.join(root, FOLDER)
        self._names = names
        self._owner = owner
        self._alive = alive
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            self._host = file.read().strip().replace("-", "")[:12]
        self._space = os.readlink("/proc/self/ns/pid").strip("pid:[]")

    def take(self, path: str) -> Holder | None:
        """The lock on `path`, or None while a living process has it or wants it at the same moment."""
        digest = hashlib.blake2b(path.encode(), digest_size=8).hexdigest()
        pid = os.getpid()
        mine = Holder(digest, self._owner, self._host, self._space, pid, _started(pid) or "", secrets.token_hex(4))
        if any(self.lives(other) for other in self._holders(digest)):
            return None
        with _held_lock:
            _held.add(mine.token)
        try:
            self._make(mine.name)
            others = [other for other in self._holders(digest) if other.token != mine.token]
            if any(self.lives(other) for other in others):
                self.release(mine)
                return None
        except OSError:
            self.release(mine)
            raise
        for other in others:
            self._remove(other.name)
        return mine

    def release(self, holder: Holder) -> None:
        """Whatever the mount does, the entry counts as dead for this process from now on; it is removed if that can be
        done."""
        with _held_lock:
            _held.discard(holder.token)
        with contextlib.suppress(OSError):
            self._remove(holder.name)

    def holds(self, holder: Holder) -> bool:
        """Whether the entry is still there: who had evidence against this process has removed it."""
        return holder.name in self._names.list(self._folder)

    def lives(self, holder: Holder) -> bool:
        """Whether the holder may still be running; True when there is no evidence."""
        if (holder.host, holder.space) == (self._host, self._space):
            if holder.pid == os.getpid() and holder.started == _started(holder.pid):
                with _held_lock:
                    return holder.token in _held
            return _started(holder.pid) == holder.started
        return not holder.owner or self._alive is None or self._alive(holder.owner)

    def _holders(self, digest: str) -> Sequence[Holder]:
        found = [Holder.parse(name) for name in self._names.list(self._folder)]
        return [holder for holder in found if holder is not None and holder.lock == digest]

    def _make(self, name: str) -> None:
        self._names.mkdir(self._folder)
        self._names.close(self._names.open(os.path.join(self._folder, name), os.O_RDWR | os.O_CREAT | os.O_EXCL))

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._names.unlink(os.path.join(self._folder, name))


def _started(pid: int) -> str | None:
    """Start of a process in ticks since boot, or None if there is none of that number."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A zombie has ended: it holds nothing, though nobody has asked for its status yet.
    return None if fields[0] in "ZX" else fields[19]


class LockFile(StoreFile):
    """A held lock as the segment engine sees it: a file that can only be closed."""

    def __init__(self, release: Callable[[], None], holds: Callable[[], bool]) -> None:
        self._release: Callable[[], None] | None = release
        self._holds = holds

    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        raise self._refusal()

    def preadv(self, buffers: Sequence[memoryview], offset: int, deadline: float | None = None) -> int:
        raise self._refusal()

    def datasync(self) -> None:
        raise self._refusal()

    def truncate(self, size: int) -> None:
        raise self._refusal()

    def size(self) -> int:
        raise self._refusal()

    def held(self) -> bool:
        return self._holds()

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    @staticmethod
    def _refusal() -> OSError:
        return OSError(errno.EBADF, "a lock on 3FS has no bytes")
