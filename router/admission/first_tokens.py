"""How fast first tokens came of late: who can no longer have one in time is not kept waiting for it."""

from __future__ import annotations


class FirstTokens:
    """The last of them, of which only those are kept that can still be an answer: one that is older, of no fewer tokens
    and no faster than another never is, so that a handful is left of hundreds."""

    def __init__(self, most: int, recent_s: float) -> None:
        """At most `most`, none older than `recent_s` seconds counts."""
        self._most = most
        self._recent_s = recent_s
        self._kept: list[tuple[float, int, float]] = []
        """When, of how many uncached tokens, after how many seconds; the oldest first."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """A prompt of so many uncached tokens had its first token after so many seconds."""
        since = now - self._recent_s
        kept = [one for one in self._kept if one[0] >= since and (one[1] < tokens or one[2] < seconds)]
        kept.append((now, tokens, seconds))
        self._kept = kept[-self._most :]

    def fastest_s(self, tokens: int, now: float) -> float:
        """The shortest time of a prompt with no more to compute than `tokens`; 0 where none is known."""
        since = now - self._recent_s
        return min((took for at, cost, took in self._kept if cost <= tokens and at >= since), default=0.0)
