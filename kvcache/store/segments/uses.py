"""What was used through this process, and how the sweeper of a store learns what was used through others.

What one process hits, another may be about to evict. Every few seconds a process that is not the sweeper leaves the
prefixes that were used through it as a small file in `uses/`, which the sweeper reads and removes. A lost one costs no
data, only a little of the order of eviction: nothing here is synced, and few files of a process wait at a time.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.keys import KEY_BYTES, Key
from headrace.kvcache.store.base import WallClock
from headrace.kvcache.store.files import FileLayer
from headrace.kvcache.store.retention.heat import Heat
from headrace.kvcache.store.retention.ledger import Ledger
from headrace.kvcache.store.retention.pressure import Places, Plan, Pressure
from headrace.kvcache.store.segments.open_segment import read_whole, write_all

_log = logging.getLogger(__name__)
USES = "uses"
_SUFFIX = ".use"
_MAGIC = b"HRUS"
_HEAD = struct.Struct("<4sII")
"""Magic, bytes behind the head, their CRC-32."""
_USE = struct.Struct("<dBI")
"""Wall clock seconds, whether it was a hit, entries."""
_TOKENS = struct.Struct("<I")
_SEND_S = 5.0
_MAX_UNSENT = 4096
"""Uses that wait to be sent; older ones are forgotten first (L12)."""
_WAITING = 8
"""Files of one process that the sweeper has not read yet; older ones are replaced (L12)."""


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """A prefix that was used, prefix first."""

    at: float
    hit: bool
    entries: tuple[tuple[Key, int], ...]
    """(key, position at its end in tokens)."""


def encode_uses(uses: Sequence[PrefixUse]) -> bytes:
    body = b"".join(
        _USE.pack(use.at, use.hit, len(use.entries))
        + b"".join(key + _TOKENS.pack(tokens) for key, tokens in use.entries)
        for use in uses
    )
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def decode_uses(data: bytes) -> tuple[PrefixUse, ...] | None:
    """None if the file is torn or none of ours."""
    if len(data) < _HEAD.size:
        return None
    magic, size, crc = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or size != len(body) or crc != zlib.crc32(body):
        return None
    uses = []
    at = 0
    while at < len(body):
        time_s, hit, count = _USE.unpack_from(body, at)
        at += _USE.size
        entries = []
        for _ in range(count):
            entries.append((body[at : at + KEY_BYTES], _TOKENS.unpack_from(body, at + KEY_BYTES)[0]))
            at += KEY_BYTES + _TOKENS.size
        uses.append(PrefixUse(time_s, bool(hit), tuple(entries)))
    return tuple(uses)


class UseFiles:
    """One thread sends, one reads."""

    def __init__(self, files: FileLayer, writer: str) -> None:
        self._files = files
        self._writer = writer
        self._number = 0

    def send(self, uses: Sequence[PrefixUse]) -> None:
        """Leave them for the sweeper. OSError if the store cannot be written."""
        self._number += 1
        path = f"{USES}/{self._writer}-{self._number}"
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(f"{USES}/{self._writer}-{self._number - _WAITING}{_SUFFIX}")
        file = self._files.create(path, direct=False)
        try:
            write_all(file, [memoryview(encode_uses(uses))], 0)
        finally:
            file.close()
        self._files.rename(path, path + _SUFFIX)

    def receive(self) -> Iterator[PrefixUse]:
        """What others left, removed from the disk. Whole files only; a torn one is thrown away."""
        for name in self._files.list(USES):
            if not name.endswith(_SUFFIX):
                continue
            path = f"{USES}/{name}"
            try:
                file = self._files.open(path, direct=False)
            except FileNotFoundError:
                continue
            try:
                uses = decode_uses(bytes(read_whole(file)))
            finally:
                file.close()
            if uses is None:
                _log.warning("%s is torn: the uses it told of are not counted", path)
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(path)
            yield from uses or ()


class Uses:
    """Thread-safe."""

    def __init__(self, files: FileLayer, writer: str, wall: WallClock) -> None:
        self._use_files = UseFiles(files, writer)
        self._wall = wall
        self._lock = threading.Lock()
        self._heat = Heat()
        self._unsent: deque[PrefixUse] = deque(maxlen=_MAX_UNSENT)
        self._sent_at = time.monotonic()
        self._elected = False

    def used(self, rows: Sequence[IndexRow], *, hit: bool) -> None:
        """A prefix was used, given prefix first; `hit` False if it was computed although it was there."""
        if not rows:
            return
        use = PrefixUse(self._wall(), hit, tuple((row.key, row.tokens) for row in rows))
        with self._lock:
            self._heat.touch(use.entries, use.at, hit=hit)
            if not self._elected:
                self._unsent.append(use)

    def tick(self) -> None:
        """Unless this process sweeps, let the one that does know. OSError if the store cannot be written."""
        now = time.monotonic()
        with self._lock:
            if self._elected or not self._unsent or now - self._sent_at < _SEND_S:
                return
            uses = list(self._unsent)
            self._unsent.clear()
        self._sent_at = now
        self._use_files.send(uses)

    def gather(self) -> None:
        """This process sweeps: take what others left."""
        with self._lock:
            self._elected = True
            self._unsent.clear()
        for use in self._use_files.receive():
            with self._lock:
                self._heat.touch(use.entries, use.at, hit=use.hit)

    def plan(self, pressure: Pressure, ledger: Ledger, places: Places) -> Plan | None:
        """Pressure.plan with what is known here."""
        with self._lock:
            return pressure.plan(ledger, self._heat, places)

    def hold(self, rows: Iterable[IndexRow], written: int) -> Mapping[Key, float]:
        """These records are about to be appended elsewhere; when each was last used."""
        with self._lock:
            for row in rows:
                self._heat.hold(row.key, written)
            return {row.key: self._heat.last_use(row.key, written) for row in rows}

    def rank(self, key: Key, written: int) -> int:
        with self._lock:
            return self._heat.rank(key, written)

    def forget(self, rows: Iterable[IndexRow]) -> None:
        """These records are gone."""
        with self._lock:
            self._heat.forget(row.key for row in rows)
