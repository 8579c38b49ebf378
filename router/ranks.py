"""Small numbers for live ranks: every table of the router is a set of columns, and a rank's number is its row.

A number is used again after its rank was released, so whoever keeps columns clears a row when its rank leaves.
"""

from __future__ import annotations

import heapq

from headrace.router.topology import RankId


class RankNumbers:
    """RankId ↔ 0, 1, 2 …, the lowest free number first, so that columns stay short."""

    def __init__(self) -> None:
        self._numbers: dict[RankId, int] = {}
        self._ranks: list[RankId | None] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """Ranks that have a number."""
        return len(self._numbers)

    @property
    def size(self) -> int:
        """One more than the highest number that was ever given out: the length of a column."""
        return len(self._ranks)

    def take(self, rank: RankId) -> int:
        """The rank's number; a new one if it has none."""
        number = self._numbers.get(rank)
        if number is None:
            number = heapq.heappop(self._free) if self._free else len(self._ranks)
            if number == len(self._ranks):
                self._ranks.append(None)
            self._numbers[rank] = number
            self._ranks[number] = rank
        return number

    def get(self, rank: RankId) -> int | None:
        """The rank's number, or None."""
        return self._numbers.get(rank)

    def rank(self, number: int) -> RankId:
        """The rank of a number. Raises KeyError for a number that is free."""
        rank = self._ranks[number] if 0 <= number < len(self._ranks) else None
        if rank is None:
            raise KeyError(f"no rank has the number {number}")
        return rank

    def release(self, rank: RankId) -> int | None:
        """Free the rank's number and return it; None if it has none."""
        number = self._numbers.pop(rank, None)
        if number is not None:
            self._ranks[number] = None
            heapq.heappush(self._free, number)
        return number
