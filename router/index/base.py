"""What the index answers, and its interface. Holders are rank numbers (ranks.py)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from headrace.kvcache.keys import Key

Blocks = npt.NDArray[np.int32]


class HolderTier(enum.IntFlag):
    """A rank's own tiers. The store is nobody's, and apart (`StoreView`)."""

    DEVICE = 1
    HOST = 2


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of one prompt can be used where, in leading blocks, each usable as a whole (L4): every block is there
    and, where the layout has snapshots, one at the end. Columns have one entry per rank number."""

    device: Blocks
    """In the rank's device pool: nothing to load."""
    local: Blocks
    """In its device pool or host tier together; at least `device`."""
    shared: int
    """Whatever any rank can load: from the store or from a peer's host tier."""
    mixed: Blocks | None = None
    """With blocks and snapshots of its own and loaded ones together; at least the other three. None: no more than
    those, as far as anybody knows."""

    def longest(self) -> int:
        """What the rank that reaches furthest can use; 0 without ranks."""
        furthest = self.local if self.mixed is None else self.mixed
        return max(self.shared, int(furthest.max())) if len(furthest) else 0

    def reach_of(self, rank: int) -> int:
        """What one rank can use, wherever it lies."""
        return max(int(self.local[rank]), self.shared) if self.mixed is None else int(self.mixed[rank])

    def reach(self) -> Blocks:
        """What each rank can use, wherever it lies."""
        return np.maximum(self.local, np.int32(self.shared)) if self.mixed is None else self.mixed


def no_match(ranks: int) -> PrefixMatch:
    """Nothing is known of the prompt."""
    empty = np.zeros(ranks, np.int32)
    return PrefixMatch(empty, empty, 0)


@dataclass(frozen=True, slots=True)
class StorePrefix:
    """What the store is known to hold of one prompt."""

    blocks: int = 0
    """Leading blocks."""
    snapshots: frozenset[int] = frozenset()
    """Numbers of blocks behind which it has a snapshot."""


NOTHING_STORED: Final = StorePrefix()


class PrefixIndex(Protocol):
    """Blocks and snapshots of ranks' own tiers, by key. One thread. Inside its byte budget it is exact: what was stored
    and not removed is found; over it the longest unused keys are forgotten first, which costs hits, never correctness.
    """

    def stored(self, holder: int, tier: HolderTier, keys: Sequence[Key]) -> None:
        """Entries are readable there now. Blocks and snapshots alike: their keys differ."""
        ...

    def removed(self, holder: int, tier: HolderTier, keys: Sequence[Key]) -> None:
        """Entries are gone from there. Unknown ones are no error."""
        ...

    def clear(self, holder: int, tier: HolderTier) -> int:
        """Forget all that a rank holds in those tiers, in time proportional to what it held; how many entries."""
        ...

    def match(
        self, blocks: Sequence[Key], snapshots: Sequence[Key] | None, limit: int, store: StorePrefix = NOTHING_STORED
    ) -> PrefixMatch:
        """`snapshots[i]`: key of the snapshot behind block i + 1, None where the layout has none. `limit`: no prefix of
        more blocks may be used (bounded replay, or the last token that has to be computed)."""
        ...

    @property
    def entries(self) -> int:
        """Pairs of key and holder."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that the index takes, bytes."""
        ...
