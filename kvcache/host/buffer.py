"""Where entries of peers arrive: registered memory, in units of a block or a snapshot.

A unit is used by one fetch at a time. When the wait for a fetch ends before the wire is quiet its units are
quarantined: neither free nor readable until it is (L7). Counts are sizes of live sets (L11).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from headrace.kvcache.entries import EntryKind
from headrace.kvcache.host.arena import Arena, ArenaShape, HostTierError


@dataclass(frozen=True, slots=True)
class Unit:
    """A place for one entry."""

    kind: EntryKind
    offset: int


@dataclass(frozen=True)
class BufferStats:
    total_bytes: int
    in_use: int
    """Units being filled or read."""
    quarantined: int
    """Units whose fetch was given up and may still write."""


class FetchBuffer:
    """Thread-safe."""

    def __init__(self, memory: memoryview, shape: ArenaShape) -> None:
        """memory: writable, shape.total_bytes, at least one slab. Raises HostTierError."""
        if memory.readonly or memory.nbytes != shape.total_bytes or not shape.slabs:
            raise HostTierError(f"a fetch buffer needs {max(shape.total_bytes, shape.slab_bytes)} writable bytes")
        self.shape = shape
        self._view = memory.cast("B")
        self._arena = Arena(shape)
        self._lock = threading.Lock()
        self._in_use: set[Unit] = set()
        self._quarantined: set[Unit] = set()

    def take(self, kind: EntryKind) -> Unit | None:
        """A unit for one fetch; None while all are in use."""
        with self._lock:
            offset = self._arena.take(kind)
            if offset is None:
                return None
            unit = Unit(kind, offset)
            self._in_use.add(unit)
            return unit

    def quarantine(self, unit: Unit) -> None:
        """Nobody waits for the fetch into it any more, and the wire is not quiet."""
        with self._lock:
            if unit in self._in_use:
                self._in_use.discard(unit)
                self._quarantined.add(unit)

    def give(self, unit: Unit) -> None:
        """The wire is quiet and nobody reads it. Raises HostTierError for a unit that is not in use (once each, L7)."""
        with self._lock:
            self._arena.give(unit.kind, unit.offset)
            self._in_use.discard(unit)
            self._quarantined.discard(unit)

    def read(self, unit: Unit, length: int) -> memoryview:
        """Its first bytes, read-only."""
        return self._view[unit.offset : unit.offset + length].toreadonly()

    def stats(self) -> BufferStats:
        with self._lock:
            return BufferStats(self.shape.total_bytes, len(self._in_use), len(self._quarantined))

    def problems(self) -> tuple[str, ...]:
        """What is wrong with the books (L11)."""
        with self._lock:
            found = list(self._arena.problems())
            units = self._in_use | self._quarantined
            taken = {Unit(kind, offset) for kind in EntryKind for offset in self._arena.in_use(kind)}
            if units != taken or self._in_use & self._quarantined:
                found.append("units taken and units in use or quarantined disagree")
            return tuple(found)
