"""An index by brute force behind the router's interface, and the LRU of one worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from headrace.kvcache.keys import Key
from headrace.router.index.base import HolderTier, PrefixMatch, StorePrefix

NOTHING = StorePrefix()


class PlainIndex:
    """Holders of a key as bits of one integer. Device pools only, layouts without snapshots."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._holders: dict[Key, int] = {}

    def stored(self, holder: int, tier: HolderTier, keys: Sequence[Key]) -> None:
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) | 1 << holder

    def removed(self, holder: int, tier: HolderTier, keys: Sequence[Key]) -> None:
        for key in keys:
            left = self._holders.get(key, 0) & ~(1 << holder)
            if left:
                self._holders[key] = left
            else:
                self._holders.pop(key, None)

    def clear(self, holder: int, tier: HolderTier) -> int:
        keys = [key for key, holders in self._holders.items() if holders >> holder & 1]
        self.removed(holder, tier, keys)
        return len(keys)

    def match(
        self, blocks: Sequence[Key], snapshots: Sequence[Key] | None, limit: int, store: StorePrefix = NOTHING
    ) -> PrefixMatch:
        found = np.zeros(self._ranks, np.int32)
        holding = (1 << self._ranks) - 1
        depth = 0
        for depth, key in enumerate(blocks[:limit]):
            still = holding & self._holders.get(key, 0)
            for rank in _bits(holding & ~still):
                found[rank] = depth
            holding = still
            if not holding:
                break
        for rank in _bits(holding):
            found[rank] = min(depth + 1, limit)
        return PrefixMatch(found, found, 0)

    @property
    def entries(self) -> int:
        return sum(holders.bit_count() for holders in self._holders.values())

    @property
    def nbytes(self) -> int:
        return 200 * len(self._holders)


class Lru:
    """Blocks of one worker, at most `capacity` of them (None: any number)."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._held: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def lead(self, blocks: Sequence[Key]) -> int:
        """How many leading blocks are there."""
        held = self._held
        return next((at for at, block in enumerate(blocks) if block not in held), len(blocks))

    def use(self, blocks: Sequence[Key]) -> tuple[list[Key], list[Key]]:
        """Insert or touch all, suffix before prefix; returns those that came and those that left."""
        held = self._held
        came = [block for block in blocks if block not in held]
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        left: list[Key] = []
        while self._capacity is not None and len(held) > self._capacity:
            left.append(held.popitem(last=False)[0])
        if not left:
            return came, left
        gone = set(left)
        fresh = set(came)
        return [block for block in came if block not in gone], [block for block in left if block not in fresh]


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
