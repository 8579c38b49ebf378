"""Prefixes that were sent somewhere and that no event has told of yet, so that equal prompts of one burst meet (L22).

A prompt's keys are kept at lengths that grow by a quarter each and at its end, and looked up at the same places: of a
shared beginning at least four fifths are found, with some 30 look-ups in a thousand blocks. What is found counts as a
hit at that rank and nothing more, so the cost's own bound on affinity holds for it too (L21).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import lru_cache

from headrace.kvcache.keys import Key

RATIO = 1.25


@lru_cache(maxsize=4096)
def places(blocks: int) -> tuple[int, ...]:
    """Lengths of prefixes that are kept of a prompt of so many blocks, the longest first."""
    found = [blocks] if blocks else []
    length = 1
    grid = []
    while length < blocks:
        grid.append(length)
        length = max(length + 1, int(length * RATIO))
    return tuple(found + grid[::-1])


class Pending:
    """Who was sent which prefixes a moment ago. Bounded in time and number."""

    def __init__(self, keep_s: float = 10.0, most: int = 100_000) -> None:
        """`keep_s`: after that events have told, or the work was lost. `most`: prefixes kept; the oldest leave
        first."""
        self._keep_s = keep_s
        self._most = most
        self._holders: dict[Key, dict[int, float]] = {}
        self._order: deque[tuple[float, Key, int]] = deque()

    def __len__(self) -> int:
        return len(self._order)

    def note(self, blocks: Sequence[Key], number: int, now: float) -> None:
        """A prompt was sent to that rank."""
        self._expire(now)
        for place in places(len(blocks)):
            key = blocks[place - 1]
            self._holders.setdefault(key, {})[number] = now
            self._order.append((now, key, number))

    def found(self, blocks: Sequence[Key], now: float) -> list[tuple[int, Collection[int]]]:
        """Numbers of leading blocks, and the rank numbers that so many will soon be at; the most blocks first. A rank
        stands in as many as it was sent."""
        self._expire(now)
        holders = self._holders
        return [(place, holders[key]) for place in places(len(blocks)) if (key := blocks[place - 1]) in holders]

    def depths(self, blocks: Sequence[Key], now: float) -> dict[int, int]:
        """Leading blocks that will soon be at each rank, by rank number."""
        depths: dict[int, int] = {}
        for place, numbers in self.found(blocks, now):
            for number in numbers:
                depths.setdefault(number, place)
        return depths

    def clear(self, number: int) -> None:
        """The rank is gone; its number is the next newcomer's, which was sent none of it."""
        for key in [key for key, holders in self._holders.items() if number in holders]:
            holders = self._holders[key]
            del holders[number]
            if not holders:
                del self._holders[key]

    def _expire(self, now: float) -> None:
        while self._order and (len(self._order) > self._most or self._order[0][0] < now - self._keep_s):
            since, key, number = self._order.popleft()
            holders = self._holders.get(key)
            if holders is not None and holders.get(number) == since:
                del holders[number]
                if not holders:
                    del self._holders[key]
