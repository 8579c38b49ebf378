"""A trickle for ranks that were slow: whoever gets nothing is never seen to have recovered (L14)."""

from __future__ import annotations

import math

from headrace.router.columns import Floats, Ints

EVERY_S = 5.0
"""Shortest time between two probes of a rank."""
EVERY_REQUESTS = 32
"""One request of so many is a probe at most: those that are pay for it with a slow answer."""


class Probes:
    """Which slow rank is tried next. A rank is tried with one request at a time, when it has none of this router."""

    def __init__(self) -> None:
        self._since = EVERY_REQUESTS
        """Requests since the last probe."""
        self._last: dict[int, float] = {}
        """When a rank was last tried, by its number."""

    def clear(self, number: int) -> None:
        """The rank is gone; its number is the next newcomer's, which was never tried."""
        self._last.pop(number, None)

    def due(self) -> bool:
        """One more request: whether it may be a probe."""
        self._since += 1
        return self._since > EVERY_REQUESTS

    def take(self, numbers: Ints, slowness: Floats, own: Ints, now: float) -> int | None:
        """The row that it should go to; None: it goes where it is best served."""
        rows = ((slowness > 1.0) & (own <= 0)).nonzero()[0].tolist()
        if not rows:
            return None
        row = min(rows, key=lambda row: self._last.get(int(numbers[row]), -math.inf))
        number = int(numbers[row])
        if now - self._last.get(number, -math.inf) < EVERY_S:
            return None
        self._since = 0
        self._last[number] = now
        return int(row)
