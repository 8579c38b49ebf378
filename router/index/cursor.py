"""How far one source's events have been applied, and what to ask it next (L14, L24). No sockets, no clock.

A source is a worker: an id that stays, incarnations that do not. A cursor stands in one incarnation at a sequence, and
is in one of two states:

    following   every event up to `applied` is in the index; the next one is applied when it comes
    lost        events are missing; only a snapshot helps, and what comes meanwhile waits, boundedly

Events may come late, twice, or from a life that is over; they may be missing. Whatever comes, once a snapshot and the
events behind its watermark have come through, the index holds what the source holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from headrace.router.index.base import PrefixIndex
from headrace.router.index.changes import BOTH_TIERS, Change, Cleared, Numbered, Stored, weight

MOST_WAITING_KEYS: Final = 65_536
"""Keys of events that wait for a snapshot; beyond, another snapshot is needed."""


class Holdings(Protocol):
    """What a cursor keeps true: one source's part of the index."""

    def apply(self, change: Change) -> None:
        """Take one change in. Twice the same changes nothing."""
        ...

    def clear(self) -> None:
        """The source holds nothing, as far as anybody knows."""
        ...


@dataclass
class CursorCounts:
    """Since the cursor was made."""

    applied: int = 0
    """Events."""
    keys: int = 0
    """In them."""
    repeated: int = 0
    """Events that had been applied, or were in a snapshot, before they came."""
    foreign: int = 0
    """Events of another incarnation, dropped."""
    gaps: int = 0
    """Times that events were found missing."""
    snapshots: int = 0
    """Taken in full."""


@dataclass
class _Taking:
    """A snapshot on its way."""

    watermark: int
    keys: int = 0


@dataclass(eq=False)
class Cursor:
    """Where one source stands. The owner calls `restart` when it hears of an incarnation, and follows `wanted`."""

    holdings: Holdings
    incarnation: str = ""
    """Empty: no life of the source is known, and everything is dropped."""
    applied: int = 0
    """Every event up to it is in the index."""
    lost: bool = False
    """A snapshot is wanted."""
    counts: CursorCounts = field(default_factory=CursorCounts)
    _waiting: dict[int, Numbered] = field(default_factory=dict)
    """Events behind a gap, by sequence."""
    _waiting_keys: int = 0
    _skipped: int = 0
    """The highest sequence of an event that was dropped because too many waited."""
    _taking: _Taking | None = None

    @property
    def next_sequence(self) -> int:
        """What to ask a watch for."""
        return self.applied + 1

    def restart(self, incarnation: str) -> None:
        """The source lives again: what its former life held is gone with it (L14). A life begins at sequence 1, holding
        nothing, so that whoever hears all its events needs no snapshot. Empty: it is gone."""
        if incarnation == self.incarnation:
            return
        self.holdings.clear()
        self.incarnation = incarnation
        self.applied = 0
        self.lost = False
        self._forget_waiting()
        self._taking = None

    def take(self, incarnation: str, events: Sequence[Numbered], *, gap: bool = False) -> None:
        """Events of a watch. `gap`: the source says that it no longer has what was asked for."""
        if not incarnation or incarnation != self.incarnation:
            self.counts.foreign += len(events)
            return
        if gap:
            self._lose()
        for event in events:
            self._take(event)

    def _take(self, event: Numbered) -> None:
        if event.sequence <= self.applied:
            self.counts.repeated += 1
        elif event.sequence == self.applied + 1 and not self.lost:
            self._apply(event)
        else:
            self._lose()
            self._wait(event)

    def begin_snapshot(self, incarnation: str, watermark: int) -> bool:
        """A snapshot's first piece is here: it replaces all that is known of the source. False: it is another life's,
        or older than what has been applied; drop it."""
        if not incarnation or incarnation != self.incarnation or watermark < self.applied:
            return False
        self._lose(counted=False)
        self.holdings.clear()
        self._taking = _Taking(watermark)
        return True

    def snapshot_piece(self, incarnation: str, entries: Iterable[Stored]) -> bool:
        """Entries of the snapshot that was begun. False: it is no longer wanted (the source lives again)."""
        if self._taking is None or incarnation != self.incarnation:
            return False
        for stored in entries:
            self.holdings.apply(stored)
            self._taking.keys += len(stored.keys)
        return True

    def end_snapshot(self, incarnation: str) -> bool:
        """It came through. Events behind its watermark that waited are applied; whether the cursor follows again."""
        taking = self._taking
        if taking is None or incarnation != self.incarnation:
            return False
        self._taking = None
        self.applied = taking.watermark
        self.counts.snapshots += 1
        waiting = [self._waiting[sequence] for sequence in sorted(self._waiting)]
        skipped = self._skipped
        self._forget_waiting()
        self.lost = False
        for event in waiting:
            self._take(event)
        if skipped > self.applied:
            self._lose()
            self._skipped = skipped
        return not self.lost

    def abandon_snapshot(self) -> None:
        """It broke off. The cursor is lost as before; what came of it stays, since it was true a moment ago."""
        self._taking = None

    def suspect(self) -> None:
        """What the index says of the source has proved wrong: ask it for everything."""
        self._lose()

    def _apply(self, event: Numbered) -> None:
        self.applied = event.sequence
        self.counts.applied += 1
        if event.change is not None:
            self.counts.keys += weight(event.change)
            self.holdings.apply(event.change)

    def _lose(self, *, counted: bool = True) -> None:
        if not self.lost:
            self.lost = True
            self.counts.gaps += counted

    def _wait(self, event: Numbered) -> None:
        if event.sequence in self._waiting:
            self.counts.repeated += 1
            return
        size = weight(event.change)
        if self._waiting_keys + size > MOST_WAITING_KEYS:
            self._skipped = max(self._skipped, event.sequence)
            return
        self._waiting[event.sequence] = event
        self._waiting_keys += size

    def _forget_waiting(self) -> None:
        self._waiting = {}
        self._waiting_keys = 0
        self._skipped = 0


class HolderHoldings:
    """The part of a PrefixIndex that one process's ranks hold. Its ranks share its tiers."""

    def __init__(self, index: PrefixIndex, holders: Sequence[int]) -> None:
        self._index = index
        self._holders = tuple(holders)

    def apply(self, change: Change) -> None:
        for holder in self._holders:
            match change:
                case Stored(tier, keys):
                    self._index.stored(holder, tier, keys)
                case Cleared(tier):
                    self._index.clear(holder, tier)
                case _:
                    self._index.removed(holder, change.tier, change.keys)

    def clear(self) -> None:
        for holder in self._holders:
            self._index.clear(holder, BOTH_TIERS)
