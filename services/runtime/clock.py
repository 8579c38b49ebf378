"""Time as a parameter: leases, reapers and deadlines read a clock that tests can turn by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go backwards; the origin means nothing (L8: leases use the holder's monotonic clock)."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary origin."""
        ...


class SystemClock:
    """The clock of the operating system."""

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until told otherwise; for tests and simulations."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` ≥ 0."""
        if seconds < 0:
            raise ValueError("a monotonic clock cannot go back")
        self._now += seconds
