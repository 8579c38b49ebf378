"""Who was used longest ago, exactly, without a linked list: a tick per entry, and a batch of the oldest ready to go.

Using an entry writes the next tick into its column, for a thousand at once in one step. When somebody has to be
forgotten, the oldest few per cent are sorted out at once; those used since then are passed over, and everyone else is
younger than all of them, so they leave in the exact order of their last use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from headrace.router.index.table import Entries

_LAST_TICK: Final = (1 << 32) - 1
_SAMPLE: Final = 4096
_SHARE: Final = 32
"""One in so many entries becomes a candidate at once."""
_LEAST: Final = 256


class Recency:
    """Ticks of entries."""

    BYTES: Final = 4

    def __init__(self, most_entries: int) -> None:
        self.ticks = np.empty(most_entries, np.uint32)
        self._view = self.ticks.data
        self._now = 0
        self._oldest: list[int] = []
        self._ages: list[int] = []
        self._known = 0
        """Entries that have, or had, a tick."""

    def begin(self, count: int) -> int:
        """The tick of the first of `count` entries that are used together; each next one is one older, so that of a
        chain the end is forgotten before the beginning."""
        if self._now + count > _LAST_TICK:
            self.ticks[: self._known] >>= 1
            self._now >>= 1
            self._oldest, self._ages = [], []
        self._now += count
        return self._now

    def touch(self, entry: int, tick: int) -> None:
        """The entry is used."""
        self._view[entry] = tick
        if entry >= self._known:
            self._known = entry + 1

    def touch_many(self, entries: Entries) -> None:
        """Entries are used, in the order of a prompt."""
        tick = self.begin(len(entries))
        self.ticks[entries] = tick - np.arange(len(entries))
        if len(entries):
            self._known = max(self._known, int(entries.max()) + 1)

    def oldest(self, alive: Callable[[int], int], all_alive: Callable[[], Entries]) -> int | None:
        """Take the entry that was used longest ago, of those that are `alive`. None: nobody is."""
        while True:
            while self._oldest:
                entry, age = self._oldest.pop(), self._ages.pop()
                if self._view[entry] == age and alive(entry):
                    return entry
            entries = all_alive()
            if len(entries) == 0:
                return None
            ages = self.ticks[entries]
            if len(entries) > _LEAST:
                sample = np.sort(ages[:: max(1, len(ages) // _SAMPLE)])
                old = ages <= sample[len(sample) // _SHARE]
                entries, ages = entries[old], ages[old]
            order = np.argsort(ages)[::-1]
            self._oldest, self._ages = entries[order].tolist(), ages[order].tolist()
