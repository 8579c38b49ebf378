"""Whether a peer is worth asking: one failure stands for all keys that would follow (L17)."""

from __future__ import annotations

import threading
from collections.abc import Callable

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0


class Breakers:
    """One circuit breaker per name. A failure leaves a peer alone for a while, each time twice as long, until it
    answers; after the pause it is asked again (L14: nobody is blacklisted for ever). Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, tuple[float, float]] = {}
        """Name → (until when, pause)."""

    def allows(self, name: str) -> bool:
        """May be asked."""
        with self._lock:
            return name not in self._open or self._clock() >= self._open[name][0]

    def failed(self, name: str) -> None:
        """It could not be reached, or did not answer in time. Failures of calls that began before the pause count
        once."""
        with self._lock:
            until, pause = self._open.get(name, (float("-inf"), FIRST_PAUSE_S))
            now = self._clock()
            if now >= until:
                self._open[name] = (now + pause, min(2 * pause, LONGEST_PAUSE_S))

    def answered(self, name: str) -> None:
        """It is there."""
        with self._lock:
            self._open.pop(name, None)

    def keep(self, names: frozenset[str]) -> None:
        """Forget all others: they have left."""
        with self._lock:
            for name in set(self._open) - names:
                del self._open[name]

    @property
    def open(self) -> int:
        """How many are left alone now."""
        with self._lock:
            now = self._clock()
            return sum(1 for until, _ in self._open.values() if now < until)
