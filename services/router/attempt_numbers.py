"""The clock that attempts of named requests are numbered by: it never goes back, and is behind no other router's (L16).

A router that takes a request over knows nothing of earlier attempts, and its own have to be higher. So they are tenths
of seconds since 2026, which lasts for 13 years, but the wall clock is read once only, at the start: from then on time
goes on by the monotonic clock. Every worker tells the highest number it has seen with its load, and whoever hears of
a higher one than its own clock shows sets that forward (a Lamport clock). A wall clock that jumps, either way, changes
nothing for routers that run; one that starts with a clock that was set back is put right by the first load reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from headrace.services.runtime.clock import Clock

PER_SECOND: Final = 10
FROM_S: Final = 1_767_225_600
"""2026-01-01, Unix time."""
MOST_AHEAD: Final = 365 * 86_400 * PER_SECOND
"""What is further ahead is no clock's: the numbers of all routers would soon reach their end (32 bits)."""


class AttemptNumbers:
    """Belongs to the event loop's thread."""

    def __init__(self, clock: Clock, wall: Callable[[], float] = time.time) -> None:
        """`wall`: seconds since 1970."""
        self._clock = clock
        self._origin = max(0.0, wall() - FROM_S) - clock.monotonic()
        """Seconds to add to the monotonic clock."""

    def now(self) -> int:
        """The present number, at least 0."""
        return int((self._origin + self._clock.monotonic()) * PER_SECOND)

    def see(self, number: int) -> None:
        """An attempt of this number exists."""
        late = number - self.now()
        if 0 < late <= MOST_AHEAD:
            self._origin += late / PER_SECOND
