"""How fast the cluster takes work off the queue, and when those that were refused are to come back."""

from __future__ import annotations

from collections import deque

KEPT = 512
"""Completions that are remembered at most."""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, spread evenly however many there are."""


class DrainRate:
    """Uncached tokens of requests that ended, per second, over the last `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._ends: deque[tuple[float, int]] = deque()
        self._tokens = 0

    def ended(self, tokens: int, now: float) -> None:
        """A request that had run is over."""
        self._ends.append((now, tokens))
        self._tokens += tokens
        if len(self._ends) > KEPT:
            self._tokens -= self._ends.popleft()[1]

    def rate(self, now: float) -> float | None:
        """Tokens per second; None without two completions in the window."""
        while self._ends and self._ends[0][0] < now - self._window_s:
            self._tokens -= self._ends.popleft()[1]
        if len(self._ends) < 2 or now <= self._ends[0][0]:
            return None
        # The first marks the beginning; what it took was done before.
        return max(1, self._tokens - self._ends[0][1]) / (now - self._ends[0][0])


class ReturnTimes:
    """Those that were refused form a line too: each is told when, at this rate, what was told before it and its own
    tokens will have been drained. So they do not all come back in one moment to be refused again."""

    def __init__(self, default_s: float, longest_s: float) -> None:
        self._default_s = default_s
        self._longest_s = longest_s
        self._until = 0.0
        """The last of the line comes back then."""
        self._spread = 0.0

    def next(self, tokens: int, rate: float | None, now: float) -> float:
        """Seconds from now."""
        self._spread = (self._spread + GOLDEN) % 1.0
        if rate is None:
            return self._default_s * (1.0 + self._spread)
        self._until = max(self._until, now) + tokens / rate
        delay = self._until - now
        if delay > self._longest_s:
            # The line is longer than anybody is asked to wait; its end is spread.
            self._until = now + self._longest_s
            return self._longest_s * (1.0 - self._spread / 2)
        return max(0.1, delay)
