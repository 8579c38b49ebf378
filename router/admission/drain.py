"""How fast the cluster takes work off the queue, and when those that were refused are to come back."""

from __future__ import annotations

from collections import deque

KEPT = 512
"""Completions that are remembered at most."""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, spread evenly however many there are."""


class DrainRate:
    """Uncached tokens per second that the cluster takes for this router while it is full.

    What ended over the last `window_s` tells it as long as the cluster was full then. Of a cluster that those who were
    refused come back to one by one it tells only how they come, and a time to come back made from it would grow without
    end. So the concurrency of now speaks too: by Little's law (1961) n requests that stay for t seconds are n / t a
    second.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._ends: deque[tuple[float, int, float]] = deque()
        """When, tokens, seconds from its place at decode on."""
        self._tokens = 0
        self._stays = 0.0
        self._running = 0
        self._begins = 0.0
        """Sum of the times at which those that run got their place."""

    def began(self, now: float) -> None:
        """A request has its place at decode."""
        self._running += 1
        self._begins += now

    def gave_back(self, began: float) -> None:
        """A request has lost its place, and waits for another."""
        self._running -= 1
        self._begins = self._begins - began if self._running else 0.0

    def ended(self, tokens: int, began: float, now: float) -> None:
        """A request that got its place at `began` is over."""
        self.gave_back(began)
        self._ends.append((now, tokens, now - began))
        self._tokens += tokens
        self._stays += now - began
        if len(self._ends) > KEPT:
            self._forget()

    def rate(self, now: float) -> float | None:
        """Tokens per second; None without two completions in the window."""
        while self._ends and self._ends[0][0] < now - self._window_s:
            self._forget()
        if len(self._ends) < 2 or now <= self._ends[0][0]:
            return None
        # The first marks the beginning; what it took was done before.
        drained = max(1, self._tokens - self._ends[0][1]) / (now - self._ends[0][0])
        if not self._running:
            return drained
        # Those that run have stayed for their age at least.
        stay = max(self._stays / len(self._ends), now - self._begins / self._running)
        return drained if stay <= 0 else max(drained, self._running * self._tokens / len(self._ends) / stay)

    def _forget(self) -> None:
        _, tokens, stay = self._ends.popleft()
        self._tokens -= tokens
        self._stays = self._stays - stay if self._ends else 0.0


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
