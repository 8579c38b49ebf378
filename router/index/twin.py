"""The index as plainly as it can be said (L24): dictionaries, no budget. What tests compare BlockIndex with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.kvcache.keys import Key
from headrace.router.index.base import NOTHING_STORED, HolderTier, PrefixMatch, StorePrefix


class TwinIndex:
    """PrefixIndex without limit."""

    def __init__(self) -> None:
        self.places: dict[Key, dict[int, HolderTier]] = {}
        self.ranks = 0

    def stored(self, holder: int, tier: HolderTier, keys: Sequence[Key]) -> None:
        self.ranks = max(self.ranks, holder + 1)
        for key in keys:
            held = self.places.setdefault(key, {})
            held[holder] = held.get(holder, HolderTier(0)) | tier

    def removed(self, holder: int, tier: HolderTier, keys: Sequence[Key]) -> None:
        self.ranks = max(self.ranks, holder + 1)
        for key in keys:
            held = self.places.get(key, {})
            if holder in held:
                held[holder] &= ~tier
                if not held[holder]:
                    del held[holder]
            if key in self.places and not held:
                del self.places[key]

    def clear(self, holder: int, tier: HolderTier = HolderTier.DEVICE | HolderTier.HOST) -> int:
        before = self.entries
        self.removed(holder, tier, list(self.places))
        return before - self.entries

    @property
    def entries(self) -> int:
        return sum(len(held) for held in self.places.values())

    def holders(self, key: Key) -> dict[int, HolderTier]:
        return dict(self.places.get(key, {}))

    def match(
        self, blocks: Sequence[Key], snapshots: Sequence[Key] | None, limit: int, store: StorePrefix = NOTHING_STORED
    ) -> PrefixMatch:
        """Tries every length of prefix for everybody."""
        count = max(0, min(len(blocks), limit))

        places: list[dict[int, int]] = [self._held(key) for key in blocks[:count]]
        ends: list[dict[int, int]] | None = (
            None if snapshots is None else [self._held(key) for key in snapshots[:count]]
        )
        stored = [position < store.blocks for position in range(count)]
        stored_ends = [position + 1 in store.snapshots for position in range(count)]

        def longest(has: Callable[[dict[int, int], bool], bool]) -> int:
            best = 0
            for position in range(count):
                if not has(places[position], stored[position]):
                    break
                if ends is None or has(ends[position], stored_ends[position]):
                    best = position + 1
            return best

        def lent(held: dict[int, int], stored: bool) -> bool:
            return stored or any(tiers & HolderTier.HOST.value for tiers in held.values())

        ranks = range(self.ranks)
        return PrefixMatch(
            np.array([longest(lambda held, _, r=r: bool(held.get(r, 0) & 1)) for r in ranks], np.int32),  # type: ignore[misc]
            np.array([longest(lambda held, _, r=r: r in held) for r in ranks], np.int32),  # type: ignore[misc]
            longest(lent),
            np.array([longest(lambda held, of, r=r: r in held or lent(held, of)) for r in ranks], np.int32),  # type: ignore[misc]
        )

    def _held(self, key: Key) -> dict[int, int]:
        return {holder: int(tiers) for holder, tiers in self.places.get(key, {}).items()}
