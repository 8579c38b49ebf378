"""From rows to wire descriptors: neighbours merged, requests cut to a size. Pure arithmetic on addresses.

Design ("Block"): one row is one descriptor, and rows that stand together on both sides become one larger piece, which
is what makes the wire fast: a landing region that grants consecutive rows turns a whole prompt into a few pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Pieces:
    """One wire request: ``source[i] … + length[i]`` goes to ``target[i] …``; and which items of the move it carries."""

    source: Addresses
    target: Addresses
    length: Addresses
    first: int
    """Items [first, first + count) of the move, in its order."""
    count: int

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())

    def __len__(self) -> int:
        return len(self.source)


def item_addresses(base: int, item_bytes: int, items: tuple[int, ...]) -> Addresses:
    """Address of each item: base + item · item_bytes."""
    return np.asarray(items, dtype=np.uint64) * np.uint64(item_bytes) + np.uint64(base)


def merge(source: Addresses, target: Addresses, item_bytes: int, first: int = 0) -> Pieces:
    """Join item i + 1 to item i where it follows it directly on both sides. Order is kept; n ≥ 1 items."""
    step = np.uint64(item_bytes)
    follows = (source[1:] == source[:-1] + step) & (target[1:] == target[:-1] + step)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    lengths = np.diff(np.concatenate((starts, [len(source)]))).astype(np.uint64) * step
    return Pieces(source[starts], target[starts], lengths, first, len(source))


def batches(source: Addresses, target: Addresses, item_bytes: int, batch_bytes: int) -> Iterator[Pieces]:
    """Requests of at most batch_bytes (at least one item each), in the order of the items."""
    step = max(1, batch_bytes // item_bytes)
    for first in range(0, len(source), step):
        yield merge(source[first : first + step], target[first : first + step], item_bytes, first)


def is_dense(items: tuple[int, ...]) -> bool:
    """True when the items stand one after another, so that gathering them would be a copy for nothing."""
    return items == tuple(range(items[0], items[0] + len(items)))
