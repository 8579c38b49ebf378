"""What the host tier says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.kvcache.entries import EntryInfo, Miss


@dataclass(frozen=True, slots=True)
class Pinned:
    """An entry that stays in its place until the pin ends (L7)."""

    info: EntryInfo
    pin: int
    """Names the pin; never used again in the life of the tier."""
    offset: int
    """Byte at which the payload begins in the tier's memory."""
    generation: int
    """Counts how often units were filled; a reused unit has a higher one."""


@dataclass(frozen=True)
class HostStats:
    """Sizes of now, and counters since start."""

    capacity_bytes: int = 0
    blocks: int = 0
    snapshots: int = 0
    payload_bytes: int = 0
    pins: int = 0
    pinned_entries: int = 0
    draining_entries: int = 0
    """Dropped while pinned: findable no more, freed with the last pin."""
    ghosts: int = 0
    stored: int = 0
    stored_bytes: int = 0
    known: int = 0
    """Puts of entries that were there already."""
    no_room: int = 0
    """Puts that found everything pinned, or a tier without memory."""
    hits: int = 0
    read_bytes: int = 0
    misses: Mapping[Miss, int] = field(default_factory=dict)
    evicted_blocks: int = 0
    evicted_snapshots: int = 0
    moved: int = 0
    """Entries copied elsewhere to make an empty slab."""
    bad: int = 0
    """Entries dropped because their digest differed (L3)."""


@dataclass(frozen=True)
class HostIntegrity:
    """What a check of all books found (L11)."""

    entries: int
    filling: int
    draining: int
    pins: int
    problems: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not self.problems

    @property
    def idle(self) -> bool:
        """Nothing is pinned, half written or waiting to be freed."""
        return self.sound and not (self.filling or self.draining or self.pins)
