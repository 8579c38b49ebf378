"""Bookkeeping of N equal units (rows, slots or snapshots): who holds which, what is cached, what a reader pins.

Knows indexes, owners and keys; no bytes, no torch. Every unit is in exactly one state:

- reserved: unit 0, never given out (block tables and padded batches point at it);
- free: its bytes mean nothing;
- held: at least one owner references it;
- draining: nobody references it, it has no key, a transfer or reader still pins it (L7);
- cached: nobody references it, its bytes are findable by key; evicted least recently used first, never while pinned.

Counters are sizes of live sets (L11). One thread uses a region: the engine thread of its rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from headrace.kvcache.region_check import RegionBooks, check_region
from headrace.kvcache.region_types import (
    AlreadyHeld,
    BadUnit,
    KeyConflict,
    NotHeld,
    NotPinned,
    OutOfUnits,
    Owner,
    Pin,
    PoolError,
    RegionIntegrity,
)

__all__ = [
    "AlreadyHeld",
    "BadUnit",
    "KeyConflict",
    "NotHeld",
    "NotPinned",
    "OutOfUnits",
    "Owner",
    "Pin",
    "PoolError",
    "Region",
    "RegionIntegrity",
]


class Region:
    """Units 1 … size − 1 (unit 0 reserved), or 0 … size − 1 without a reserved unit."""

    def __init__(self, name: str, size: int, *, reserve_first: bool) -> None:
        """Raises PoolError when size leaves nothing to give out though it is not 0."""
        first = 1 if reserve_first and size > 0 else 0
        if size < 0:
            raise PoolError(f"{name}: size {size} must not be negative")
        self.name = name
        self.size = size
        self.first = first
        self._free: list[int] = list(range(size - 1, first - 1, -1))
        self._owners_of: dict[int, set[Owner]] = {}
        self._held_by: dict[Owner, set[int]] = {}
        self._pins_of: dict[int, set[Pin]] = {}
        self._pinned_by: dict[Pin, set[int]] = {}
        self._draining: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._index_of: dict[bytes, int] = {}
        self.on_removed: Callable[[tuple[bytes, ...]], None] = _tell_nobody
        """Called with keys that are findable no more, evicted or forgotten (cache events)."""
        self.on_evict: Callable[[bytes, int], None] | None = None
        """Called with key and index of every cached unit as it is evicted: the last moment to give its bytes, which
        stay until the call returns, to a lower tier. It must not call the region."""

    # --- sizes -------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self.size - self.first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def pinned(self) -> int:
        return len(self._pins_of)

    @property
    def named(self) -> int:
        """Units whose bytes a key names, held or cached."""
        return len(self._key_of)

    @property
    def available(self) -> int:
        """Units that allocate() could give now: free ones and cached ones without a pin."""
        # Pins are few and bounded, cached units are most of a warm pool.
        return len(self._free) + len(self._cached) - sum(1 for index in self._pins_of if index in self._cached)

    # --- references --------------------------------------------------------------------------------------------

    def allocate(self, count: int, owner: Owner) -> tuple[int, ...]:
        """Take ``count`` units for ``owner``, evicting cached ones as needed, or none at all.

        Raises:
            OutOfUnits: fewer than ``count`` are free or evictable.
        """
        if count < 0:
            raise PoolError(f"{self.name}: cannot allocate {count} units")
        if count > len(self._free):
            available = self.available
            if count > available:
                raise OutOfUnits(self.name, count, available, self.capacity)
            self._evict(count - len(self._free))
        taken = tuple(self._free.pop() for _ in range(count))
        for index in taken:
            self._add_owner(index, owner)
        return taken

    def hold(self, indexes: Sequence[int], owner: Owner) -> None:
        """Add ``owner``'s reference to units that are held or cached (a prefix hit, a second choice of one request).

        Raises:
            BadUnit: a unit is reserved, free or draining without a key. AlreadyHeld: owner references one already, or
            it is named twice. Nothing has changed then.
        """
        mine = self._held_by.get(owner, set())
        if len(set(indexes)) != len(indexes):
            raise AlreadyHeld(f"{self.name}: {owner} would hold a unit twice in {list(indexes)}")
        for index in indexes:
            self._check_live(index)
            if index in mine:
                raise AlreadyHeld(f"{self.name}: {owner} holds unit {index} already")
            if index in self._draining:
                raise BadUnit(f"{self.name}: unit {index} is draining, its bytes have no name any more")
        for index in indexes:
            self._cached.pop(index, None)
            self._add_owner(index, owner)

    def release(self, indexes: Sequence[int], owner: Owner) -> None:
        """Drop ``owner``'s references; exactly once each (L7).

        ``indexes`` stand in prefix order: cached ones enter the LRU from the last to the first, so that a suffix is
        always evicted before the prefix it needs.

        Raises:
            NotHeld: owner does not reference one of them, or one is named twice. Nothing has changed then.
        """
        mine = self._held_by.get(owner, set())
        if len(set(indexes)) != len(indexes):
            raise NotHeld(f"{self.name}: {owner} would release a unit twice in {list(indexes)}")
        for index in indexes:
            if index not in mine:
                raise NotHeld(f"{self.name}: {owner} does not hold unit {index} (double free?)")
        for index in reversed(indexes):
            self._drop_owner(index, owner)

    def held_by(self, owner: Owner) -> frozenset[int]:
        """Units that ``owner`` references now."""
        return frozenset(self._held_by.get(owner, ()))

    def owners(self) -> frozenset[Owner]:
        return frozenset(self._held_by)

    def references(self, index: int) -> int:
        return len(self._owners_of.get(index, ()))

    def only_held_by(self, index: int, owners: frozenset[Owner]) -> bool:
        """Whether the unit could be evicted once these owners released it."""
        return self._owners_of.get(index, set()) <= owners and index not in self._pins_of

    # --- pins --------------------------------------------------------------------------------------------------

    def pin(self, indexes: Iterable[int], pin: Pin) -> None:
        """Keep the units' bytes in place until unpin, whoever releases them (L7: an in-flight send or read pins).

        Raises:
            BadUnit: a unit is reserved, out of range or free. Nothing has changed then.
        """
        wanted = list(indexes)
        for index in wanted:
            self._check_live(index)
        for index in wanted:
            self._pins_of.setdefault(index, set()).add(pin)
            self._pinned_by.setdefault(pin, set()).add(index)

    def unpin(self, pin: Pin, indexes: Iterable[int] | None = None) -> None:
        """End ``pin`` for the given units, or for all of its units; draining ones become free.

        Raises:
            NotPinned: the pin does not hold one of them (or, without indexes, anything).
        """
        mine = self._pinned_by.get(pin)
        if mine is None:
            raise NotPinned(f"{self.name}: {pin} pins nothing")
        chosen = sorted(mine) if indexes is None else list(indexes)
        for index in chosen:
            if index not in mine:
                raise NotPinned(f"{self.name}: {pin} does not pin unit {index}")
        for index in set(chosen):
            mine.discard(index)
            pins = self._pins_of[index]
            pins.discard(pin)
            if not pins:
                del self._pins_of[index]
                if index in self._draining:
                    self._draining.discard(index)
                    self._free.append(index)
        if not mine:
            del self._pinned_by[pin]

    def pinned_by(self, pin: Pin) -> frozenset[int]:
        return frozenset(self._pinned_by.get(pin, ()))

    def is_pinned(self, index: int) -> bool:
        return index in self._pins_of

    # --- keys --------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The unit whose bytes ``key`` names, or None."""
        return self._index_of.get(key)

    def key_of(self, index: int) -> bytes | None:
        return self._key_of.get(index)

    def set_key(self, index: int, key: bytes, owner: Owner) -> None:
        """Name the finished bytes of a unit that ``owner`` holds, so that it stays findable after release (L4).

        Raises:
            NotHeld: owner does not hold it. KeyConflict: key or unit is bound otherwise already.
        """
        if index not in self._held_by.get(owner, ()):
            raise NotHeld(f"{self.name}: {owner} does not hold unit {index} and may not name it")
        if self._index_of.get(key, index) != index or self._key_of.get(index, key) != key:
            raise KeyConflict(f"{self.name}: key or unit {index} is bound already")
        self._index_of[key] = index
        self._key_of[index] = key

    def forget(self, key: bytes) -> bool:
        """Unbind ``key`` (its bytes proved bad, or its namespace is dropped). True when it was bound.

        Holders keep their unit; a cached unit becomes free, or drains while pinned.
        """
        index = self._index_of.pop(key, None)
        if index is None:
            return False
        del self._key_of[index]
        if index in self._cached:
            del self._cached[index]
            self._to_free_or_drain(index)
        self.on_removed((key,))
        return True

    def forget_all(self) -> int:
        """Unbind every key without telling `on_removed`; returns how many there were. As forget() for each."""
        count = len(self._index_of)
        self._index_of.clear()
        self._key_of.clear()
        for index in self._cached:
            self._to_free_or_drain(index)
        self._cached.clear()
        return count

    def touch(self, indexes: Sequence[int]) -> None:
        """Mark cached units (in prefix order) as just used, suffix first."""
        for index in reversed(indexes):
            if index in self._cached:
                self._cached.move_to_end(index)

    def clear_cached(self) -> int:
        """Evict every cached unit that nobody pins; returns how many."""
        before = len(self._cached)
        self._evict(before)
        return before - len(self._cached)

    # --- integrity ---------------------------------------------------------------------------------------------

    def integrity(self) -> RegionIntegrity:
        """Check that every unit is in exactly one state and that all maps agree; O(units)."""
        return check_region(
            RegionBooks(
                name=self.name,
                units=range(self.first, self.size),
                free=self._free,
                owners_of=self._owners_of,
                held_by=self._held_by,
                pins_of=self._pins_of,
                pinned_by=self._pinned_by,
                draining=self._draining,
                cached=self._cached.keys(),
                key_of=self._key_of,
                index_of=self._index_of,
            )
        )

    # --- inside ------------------------------------------------------------------------------------------------

    def _check_live(self, index: int) -> None:
        if not self.first <= index < self.size:
            raise BadUnit(f"{self.name}: unit {index} is reserved or out of range")
        if index not in self._owners_of and index not in self._cached and index not in self._draining:
            raise BadUnit(f"{self.name}: unit {index} is free")

    def _add_owner(self, index: int, owner: Owner) -> None:
        self._owners_of.setdefault(index, set()).add(owner)
        self._held_by.setdefault(owner, set()).add(index)

    def _drop_owner(self, index: int, owner: Owner) -> None:
        owners, units = self._owners_of[index], self._held_by[owner]
        owners.discard(owner)
        units.discard(index)
        if not units:
            del self._held_by[owner]
        if owners:
            return
        del self._owners_of[index]
        if index in self._key_of:
            self._cached[index] = None
        else:
            self._to_free_or_drain(index)

    def _to_free_or_drain(self, index: int) -> None:
        if index in self._pins_of:
            self._draining.add(index)
        else:
            self._free.append(index)

    def _evict(self, count: int) -> None:
        """Move up to ``count`` unpinned cached units, least recently used first, to the free list."""
        victims: list[int] = []
        for index in self._cached:
            if len(victims) == count:
                break
            if index not in self._pins_of:
                victims.append(index)
        removed: list[bytes] = []
        for index in victims:
            del self._cached[index]
            key = self._key_of.pop(index)
            del self._index_of[key]
            self._free.append(index)
            removed.append(key)
            if self.on_evict is not None:
                self.on_evict(key, index)
        if removed:
            self.on_removed(tuple(removed))


def _tell_nobody(_: tuple[bytes, ...]) -> None:
    """Nobody watches."""
