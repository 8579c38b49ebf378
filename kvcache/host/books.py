"""The host tier's books: which entry lies where, who pins it, what leaves next. Not thread-safe: the tier's lock guards
them.

An entry's unit is in exactly one state: *filling* (its payload is being copied in; not findable), *held* (findable), or
*draining* (dropped while somebody pins it: findable no more, given back with the last pin, L7). Counts are sizes of
live sets (L11).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.kvcache.entries import EntryInfo, EntryKind
from headrace.kvcache.host.arena import Arena, ArenaShape, HostTierError
from headrace.kvcache.host.lineage import Lineage
from headrace.kvcache.host.s3fifo import S3Fifo
from headrace.kvcache.host.types import HostIntegrity
from headrace.kvcache.keys import Key


@dataclass(eq=False, slots=True)
class Page:
    """An entry and its place."""

    info: EntryInfo
    offset: int
    generation: int
    pins: set[int] = field(default_factory=set)
    gone: bool = False
    """Dropped while somebody reads or fills it."""
    erase: bool = False
    """Its bytes are overwritten when its unit is given back."""


class Books:
    """`removed` is told of every held entry that leaves, when it is findable no more."""

    def __init__(self, memory: npt.NDArray[np.uint8], shape: ArenaShape, removed: Callable[[EntryInfo], None]) -> None:
        """memory: uint8 [shape.total_bytes]; touched only to move an entry and to erase one."""
        self.shape = shape
        self.held: dict[Key, Page] = {}
        self.snapshots: set[Key] = set()
        """Of the held ones."""
        self.filling: dict[Key, Page] = {}
        self.draining: set[Page] = set()
        self.pins: dict[int, Page] = {}
        self.policy = S3Fifo(shape.total_bytes)
        self.evicted: Counter[EntryKind] = Counter()
        self.moved = 0
        self._bytes = memory
        self._removed = removed
        self._arena = Arena(shape)
        self._lineage = Lineage()
        self._page_at: dict[int, Page] = {}
        """Of every unit in use."""
        self._last_pin = 0
        self._generation = 0
        self._leaving: list[Key] = []
        """What is left of the family of the entry whose turn it is, the next to go last."""
        self._leaving_hits = 0

    # --- an entry's life -----------------------------------------------------------------------------------------

    def begin(self, info: EntryInfo) -> Page | None:
        """A place for a new entry, evicting others as needed; None when no room can be made."""
        # What it needs may be a leaf now, and must not leave to make room for it.
        parent = self.held.get(info.parent)
        guard = None if parent is None else self.pin(parent)
        offset = self._make_room(info.kind)
        if guard is not None:
            self.unpin(guard)
        if offset is None:
            return None
        self._generation += 1
        page = self.filling[info.key] = self._page_at[offset] = Page(info, offset, self._generation)
        return page

    def filled(self, page: Page) -> bool:
        """Its payload is there: findable from now on, unless it was dropped meanwhile. Its filler still pins it."""
        info = page.info
        del self.filling[info.key]
        if page.gone:
            self.draining.add(page)
            return False
        self.held[info.key] = page
        if info.kind is EntryKind.SNAPSHOT:
            self.snapshots.add(info.key)
        self.policy.insert(info.key, info.length)
        self._lineage.add(info.key, info.parent)
        return True

    def pin(self, page: Page) -> int:
        """Keep its bytes in place; the pin's number, never used again."""
        self._last_pin += 1
        self.pins[self._last_pin] = page
        page.pins.add(self._last_pin)
        return self._last_pin

    def unpin(self, pin: int) -> None:
        """Exactly once per pin (L7). Raises HostTierError for one that has ended."""
        page = self.pins.pop(pin, None)
        if page is None:
            raise HostTierError(f"pin {pin} of the host tier has ended already: each is released once")
        page.pins.discard(pin)
        if page.gone and not page.pins:
            self.draining.discard(page)
            self._give_back(page)

    def drop(self, page: Page, *, tell: bool = True) -> None:
        """Make a held entry unfindable; its unit is free at once, or with the last pin (L7)."""
        info = page.info
        del self.held[info.key]
        self.snapshots.discard(info.key)
        self._lineage.remove(info.key)
        if info.key in self.policy:
            self.policy.remove(info.key)
        page.gone = True
        if page.pins:
            self.draining.add(page)
        else:
            self._give_back(page)
        if tell:
            self._removed(info)

    def drop_where(self, condemned: Callable[[EntryInfo], bool], *, erase: bool = False, tell: bool = True) -> int:
        """Drop held and filling entries; how many held ones there were."""
        pages = [page for page in self.held.values() if condemned(page.info)]
        for page in pages:
            page.erase = erase
            self.drop(page, tell=tell)
        for page in self.filling.values():
            if condemned(page.info):
                page.gone, page.erase = True, page.erase or erase
        return len(pages)

    def _give_back(self, page: Page) -> None:
        if page.erase:
            self._bytes[page.offset : page.offset + page.info.length] = 0
        del self._page_at[page.offset]
        self._arena.give(page.info.kind, page.offset)

    # --- room ----------------------------------------------------------------------------------------------------

    def _make_room(self, kind: EntryKind) -> int | None:
        """A free unit, evicting what the policy gives up."""
        # A snapshot needs a slab's worth of blocks gone; where pins keep every slab occupied, more evictions do not
        # help.
        for _ in range(2 * max(self.shape.units_per_slab(each) for each in EntryKind) + 1):
            offset = self._arena.take(kind)
            if offset is not None:
                return offset
            if not self._compact(EntryKind.SNAPSHOT if kind is EntryKind.BLOCK else EntryKind.BLOCK):
                victim = self._next_to_leave()
                if victim is None:
                    return None
                page = self.held[victim]
                self.evicted[page.info.kind] += 1
                self.policy.evict(victim)
                self.drop(page)
        return self._arena.take(kind)

    def _compact(self, kind: EntryKind) -> bool:
        moves = self._arena.compact(kind, lambda offset: not self._page_at[offset].pins)
        for move in moves or ():
            page = self._page_at[move.target] = self._page_at.pop(move.source)
            length = page.info.length
            self._bytes[move.target : move.target + length] = self._bytes[move.source : move.source + length]
            page.offset = move.target
            self.moved += 1
        return moves is not None

    def _next_to_leave(self) -> Key | None:
        """The deepest descendant of the entry whose turn it is; None when all that could leave is pinned."""
        for _ in range(len(self.held) + 1):
            while self._leaving:
                root, key = self._leaving[0], self._leaving.pop()
                if root not in self.held or self.policy.hits(root) != self._leaving_hits:
                    # Used again, or dropped, meanwhile: it is somebody else's turn.
                    self._leaving.clear()
                elif key in self.held and not self.held[key].pins and not self._lineage.has_children(key):
                    return key
            turn = self.policy.candidate(self._may_leave)
            if turn is None:
                return None
            self._leaving = self._lineage.family(turn)
            self._leaving_hits = self.policy.hits(turn)
        return None

    def _may_leave(self, key: Key) -> bool:
        """Nothing of its family is pinned: what hangs on it leaves before it."""
        return not any(self.held[each].pins for each in self._lineage.family(key))

    # --- integrity -----------------------------------------------------------------------------------------------

    def integrity(self) -> HostIntegrity:
        """Check that units, entries, pins, policy and lineage agree; O(entries)."""
        problems = list(self._arena.problems())
        everything = [*self.held.values(), *self.filling.values(), *self.draining]
        for kind in EntryKind:
            offsets = [page.offset for page in everything if page.info.kind is kind]
            if len(set(offsets)) != len(offsets) or set(offsets) != self._arena.in_use(kind):
                problems.append(f"units of {kind.name.lower()} in use and entries disagree")
        if self._page_at != {page.offset: page for page in everything}:
            problems.append("units and their entries disagree")
        if len(self.policy) != len(self.held) or any(key not in self.policy for key in self.held):
            problems.append("entries and the policy's queues disagree")
        if self.policy.bytes != sum(page.info.length for page in self.held.values()):
            problems.append("the policy's bytes are not those of the entries")
        if len(self._lineage) != len(self.held) or any(key not in self._lineage for key in self.held):
            problems.append("entries and lineage disagree")
        if self.snapshots != {key for key, page in self.held.items() if page.info.kind is EntryKind.SNAPSHOT}:
            problems.append("the set of snapshots is not that of the entries")
        if {pin: page for page in everything for pin in page.pins} != self.pins:
            problems.append("pins and pinned entries disagree")
        if any(page.gone for page in self.held.values()) or any(not page.pins for page in self.draining):
            problems.append("an entry is gone and findable, or waits for a pin that has ended")
        return HostIntegrity(len(self.held), len(self.filling), len(self.draining), len(self.pins), tuple(problems))
