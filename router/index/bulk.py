"""Events of many keys at once: what is usual in columns, what is not one by one.

Usual for a stored event: each key is new, or was held by nobody or by the same holder. For a removed one: nobody else
holds it. A prefill chunk of 8,192 tokens is 64 keys, and a router of 1,000 replicas gets thousands of such events a
second, so that a key has to cost well under a microsecond.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from headrace.router.index.runs import RUN, TIER_BITS, TIERS, Words

MANY: Final = 24
"""From so many keys on."""


def joined(words: Words, entry: int) -> tuple[Words, Words]:
    """Words with a holder's tiers added, where that needs no run; and how it went: 0 the holder was there, 1 it is the
    first, 2 it has to be added to others (the word is unchanged)."""
    mine = (words >> TIER_BITS == entry >> TIER_BITS) & (words != 0)
    free = words == 0
    alone = mine | free
    after: Words = np.where(alone, words | np.uint32(entry), words)
    return after, np.where(free, 1, np.where(mine, 0, 2)).astype(np.uint32)


def left(words: Words, entry: int) -> tuple[Words, Words]:
    """Words without these tiers of a holder; and how it went: 0 it holds the entry still, or never did, 1 it has left
    it, 2 it stands among others (the word is unchanged)."""
    mine = (words >> TIER_BITS == entry >> TIER_BITS) & (words != 0)
    after: Words = np.where(mine, words & ~np.uint32(entry & TIERS), words)
    gone = mine & (after & TIERS == 0)
    after[gone] = 0
    return after, np.where(gone, 1, np.where(words >= RUN, 2, 0)).astype(np.uint32)
