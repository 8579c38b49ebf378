"""From who holds which block to how much of a prompt everybody can use, as a whole or not at all (L4).

Pure functions over pairs (position, holder). `Chain` in their names: leading positions without a hole.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.router.index.base import Blocks

Positions = npt.NDArray[np.int32]
Holders = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def chain_lengths(positions: Positions, holders: Holders, ranks: int) -> Blocks:
    """Leading positions 0, 1, … that each holder has; no pair comes twice.

    A holder without a hole has exactly those whose sum is n(n − 1)/2, which is nearly everybody. Of the others that
    begin at 0, sorted by holder and position, those count whose place in the holder's own list is their position.
    """
    counts = np.bincount(holders, minlength=ranks)
    sums = np.bincount(holders, positions, minlength=ranks)
    lengths = counts.astype(np.int32)
    holed = sums != counts * (counts - 1) // 2
    if not holed.any():
        return lengths
    lengths[holed] = 0
    begins = np.zeros(ranks, np.bool_)
    begins[holders[positions == 0]] = True
    holed &= begins
    if not holed.any():
        return lengths
    mine = holed[holders]
    positions, holders = positions[mine], holders[mine]
    order = np.lexsort((positions, holders))
    positions, holders = positions[order], holders[order]
    first = np.searchsorted(holders, holders)
    leading = positions == np.arange(len(positions)) - first
    lengths[holed] = np.bincount(holders[leading], minlength=ranks)[holed]
    return lengths


def last_ends(positions: Positions, holders: Holders, ends: Blocks) -> Blocks:
    """For each holder the largest of its positions + 1 that is at most its end: where its last snapshot lies."""
    best = np.zeros(len(ends), np.int32)
    inside = positions < ends[holders]
    np.maximum.at(best, holders[inside], positions[inside] + 1)
    return best


def leading(flags: Flags) -> int:
    """How many are true before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())


def last_end(flags: Flags, end: int) -> int:
    """The largest position + 1 ≤ end whose flag is true, or 0."""
    places = flags[:end].nonzero()[0]
    return int(places[-1]) + 1 if len(places) else 0
