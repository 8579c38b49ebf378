"""Erasure for privacy: a log per namespace of who was erased and up to where, honoured by every read and every rebuild.

An erasure covers the segments that exist when it is made, of one tenant or of the whole namespace, as a fence: for each
writer the highest segment number. No clock is asked: a record lies behind the fence or before it. The eraser's own
writer starts new segments at the fence, so what the tenant stores later is not covered; in another process's segment
that is open at that moment it is, until that segment is full: such an entry may be a miss after a rebuild, never the
other way round.

`v1/<namespace>/erasures.log`, appended under a lock, synced before the erasure counts; a torn end was never
acknowledged and is overwritten. Other processes see it grow at their next read.
"""

from __future__ import annotations

import errno
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from headrace.kvcache.entries import TENANT_TAG_BYTES
from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.files import FileLayer, StoreFile
from headrace.kvcache.store.segments.names import ROOT, SegmentName, bucket_name
from headrace.kvcache.store.segments.open_segment import write_all

LOG = "erasures.log"
_LOCK = "erasures.lock"
_LOCK_S = 10.0
_RETRY_S = 0.005
_MAGIC = b"HRER"
_HEAD = struct.Struct("<4sIB16s")
"""Magic, bytes of the whole entry, whether it is a tenant's, tenant tag."""
_FENCE = struct.Struct("<HQ")
_CRC = struct.Struct("<I")
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Erasure:
    """One erasure in one namespace."""

    tenant_tag: bytes | None
    """None: everybody."""
    fences: Mapping[str, int]
    """Writer → highest covered segment number."""


def encode_erasure(erasure: Erasure) -> bytes:
    """As it stands in the log."""
    fences = b"".join(
        _FENCE.pack(len(name), number) + name
        for name, number in sorted((writer.encode(), number) for writer, number in erasure.fences.items())
    )
    size = _HEAD.size + len(fences) + _CRC.size
    tag = erasure.tenant_tag
    body = _HEAD.pack(_MAGIC, size, tag is not None, tag or bytes(TENANT_TAG_BYTES)) + fences
    return body + _CRC.pack(zlib.crc32(body))


def decode_erasure(data: bytes) -> tuple[Erasure, int] | None:
    """The first erasure in `data` and its size, or None if there is no whole one."""
    if len(data) < _HEAD.size:
        return None
    magic, size, of_tenant, tag = _HEAD.unpack_from(data)
    end = size - _CRC.size
    if (
        magic != _MAGIC
        or size > len(data)
        or end < _HEAD.size
        or _CRC.unpack_from(data, end)[0] != zlib.crc32(data[:end])
    ):
        return None
    fences = {}
    at = _HEAD.size
    while at < end:
        length, number = _FENCE.unpack_from(data, at)
        at += _FENCE.size
        fences[data[at : at + length].decode()] = number
        at += length
    return Erasure(tag if of_tenant else None, fences), size


class _Log:
    """One namespace's log as far as it was read."""

    def __init__(self, namespace: str) -> None:
        self.path = f"{ROOT}/{namespace}/{LOG}"
        self.of = namespace
        self.file: StoreFile | None = None
        self.end = 0
        self.namespace: dict[str, int] = {}
        self.tenants: dict[bytes, dict[str, int]] = {}
        self.read_at = float("-inf")
        self.spoiled = 0
        """Up to here a write of this process that failed may still land; nothing else is written there."""

    def apply(self, erasure: Erasure) -> None:
        tag = erasure.tenant_tag
        fences = self.namespace if tag is None else self.tenants.setdefault(tag, {})
        for writer, number in erasure.fences.items():
            fences[writer] = max(number, fences.get(writer, 0))


Learned = Callable[[bytes, bytes | None], None]
"""Is told the namespace and the tenant (None: everybody) of an erasure."""


def _nobody_told(namespace: bytes, tenant_tag: bytes | None) -> None:
    pass


class Erasures:
    """Every namespace's log. Thread-safe."""

    def __init__(self, files: FileLayer, poll_s: float = 0.0, learned: Learned = _nobody_told) -> None:
        """`poll_s`: a log is looked at again at a read that comes so long after the last look; 0: at every read, one
        system call on a local disk. `learned` is told of every erasure when it is first read, whoever made it."""
        self._files = files
        self._poll_s = poll_s
        self._learned = learned
        self._io = threading.Lock()
        """Who reads or appends: may be held as long as a slow mount takes."""
        self._lock = threading.Lock()
        """Of what was read; never held while the file system is asked."""
        self._logs: dict[str, _Log] = {}

    def erase(self, namespace: bytes, erasure: Erasure) -> None:
        """Append, sync, and honour from now on. StoreError if the log is locked for long; OSError."""
        directory = f"{ROOT}/{namespace.hex()}"
        lock = self._wait_lock(f"{directory}/{_LOCK}")
        try:
            with self._io:
                log = self._log(namespace.hex())
                self._read(log, None)
                try:
                    file = self._files.open(log.path, direct=False, writable=True)
                except FileNotFoundError:
                    file = self._files.create(log.path, direct=False)
                data = encode_erasure(erasure)
                place = max(log.end, log.spoiled)
                try:
                    write_all(file, [memoryview(data)], place)
                    file.datasync()
                except OSError:
                    log.spoiled = place + len(data)
                    raise
                finally:
                    file.close()
                self._files.sync_directory(directory)
                self._read(log, None)
        finally:
            lock.close()

    def covers(self, group: str, tenant_tag: bytes) -> bool:
        """Whether a record of that tenant in that segment was erased, as far as this process has read."""
        log = self._logs.get(_namespace_of(group))
        if log is None or not (log.namespace or tenant_tag in log.tenants):
            return False
        with self._lock:
            name = SegmentName.parse(group)
            if name is None:
                return False
            fences = log.tenants.get(tenant_tag, {})
            return name.number <= max(log.namespace.get(name.writer, 0), fences.get(name.writer, 0))

    def covers_all(self, group: str) -> bool:
        """Whether everything in that segment was erased."""
        log = self._logs.get(_namespace_of(group))
        name = SegmentName.parse(group)
        if log is None or name is None:
            return False
        with self._lock:
            return name.number <= log.namespace.get(name.writer, 0)

    def covers_any(self, group: str) -> bool:
        """Whether something in that segment was erased."""
        log = self._logs.get(_namespace_of(group))
        if log is None or not (log.namespace or log.tenants):
            return False
        name = SegmentName.parse(group)
        if name is None:
            return False
        with self._lock:
            fences = (log.namespace, *log.tenants.values())
            return any(name.number <= fence.get(name.writer, 0) for fence in fences)

    def refresh(self, groups: Iterable[str], deadline: float | None = None, *, at_once: bool = False) -> None:
        """`learn` of these segments' namespaces; `at_once`: however short ago the last look was."""
        self._learn({_namespace_of(group) for group in groups}, deadline, 0.0 if at_once else self._poll_s)

    def learn(self, namespaces: Iterable[bytes], deadline: float) -> None:
        """Read what others appended to the logs of these namespaces, by `deadline` (time.monotonic seconds).
        OSError if a log is there and cannot be read, or not in time: then nothing of that namespace may be shown."""
        self._learn({namespace.hex() for namespace in namespaces}, deadline, self._poll_s)

    def _learn(self, namespaces: Iterable[str], deadline: float | None, poll_s: float) -> None:
        now = time.monotonic()
        for namespace in namespaces:
            known = self._logs.get(namespace)
            if known is not None and now - known.read_at < poll_s:
                continue
            if not self._io.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimeoutError(errno.ETIMEDOUT, "the log of erasures was not read by the deadline")
            try:
                log = self._log(namespace)
                if now - log.read_at >= poll_s:
                    self._read(log, deadline)
                    log.read_at = now
            finally:
                self._io.release()

    def forget(self, namespace: bytes) -> None:
        """The namespace's directory is being removed: nothing is left that an erasure could cover."""
        with self._io, self._lock:
            log = self._logs.pop(namespace.hex(), None)
            if log is not None and log.file is not None:
                log.file.close()

    def close(self) -> None:
        with self._io, self._lock:
            for log in self._logs.values():
                if log.file is not None:
                    log.file.close()
            self._logs.clear()

    def _log(self, namespace: str) -> _Log:
        with self._lock:
            log = self._logs.get(namespace)
            if log is None:
                log = self._logs[namespace] = _Log(namespace)
            return log

    def _read(self, log: _Log, deadline: float | None) -> None:
        """Apply what is behind the known end, entry by entry. Behind something torn there may be more: whoever could
        not finish an entry wrote the next one behind it."""
        if log.file is None:
            try:
                log.file = self._files.open(log.path, direct=False, deadline=deadline)
            except FileNotFoundError:
                return
        buffer = bytearray(_READ_BYTES)
        while count := log.file.preadv([memoryview(buffer)], log.end, deadline):
            data = bytes(buffer[:count])
            at = size = 0
            while (found := decode_erasure(data[at:])) is None:
                if data.startswith(_MAGIC, at) and count - at >= _HEAD.size:
                    size = max(size, _HEAD.unpack_from(data, at)[1])
                at = data.find(_MAGIC, at + 1)
                if at < 0:
                    break
            if found is None:
                if size <= len(buffer) or count < len(buffer):
                    return
                buffer = bytearray(size)
                continue
            with self._lock:
                log.apply(found[0])
                log.end += at + found[1]
            self._learned(bytes.fromhex(log.of), found[0].tenant_tag)

    def _wait_lock(self, path: str) -> StoreFile:
        until = time.monotonic() + _LOCK_S
        while (lock := self._files.lock(path)) is None:
            if time.monotonic() >= until:
                raise StoreError(f"{path} is held by another process for over {_LOCK_S:.0f} s; try again")
            time.sleep(_RETRY_S)
        return lock


@lru_cache(maxsize=4096)  # asked for every record, of few segments
def _namespace_of(group: str) -> str:
    return bucket_name(group).partition("/")[0]
