"""What was used when, and so the order in which entries are given up.

Entries are given up in the order of their *rank*, lowest first: the time of the last use, where a use counts half a
cache age more than a write, since most of what is written is never used. A prefix is touched suffix first and the
larger rank is carried towards the prefix, so a block never ranks below one that needs it: giving up everything below
some rank never strands a suffix above it. (What was not used since it was appended ranks by its segment's last append,
so the one request that straddles the segment at the horizon may lose its front first; bench.retention reports the
share.)

Only used entries are remembered one by one, so memory grows with what is hit, up to `limit`, not with what is stored.
Not thread-safe: its owner holds a lock or is one thread. Empty after a restart: everything ranks by its segment then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from headrace.kvcache.keys import Key

TICKS_PER_S = 64
"""Resolution of ranks in time."""
_DEPTH_BITS = 24
_DEEPEST = (1 << _DEPTH_BITS) - 1


def tick(time_s: float) -> int:
    """Unix seconds in ticks."""
    return int(time_s * TICKS_PER_S)


def rank_at(ticks: int, tokens: int = _DEEPEST) -> int:
    """Rank of something used at `ticks` that ends `tokens` into its prompt: later is higher, and of one use a prefix
    is higher than what follows it. Fits in 63 bits."""
    return (ticks << _DEPTH_BITS) | (_DEEPEST - min(tokens, _DEEPEST))


def ticks_of(rank: int) -> int:
    return rank >> _DEPTH_BITS


@dataclass(slots=True)
class _Heated:
    rank: int
    last_use: int
    """Ticks."""


class Heat:
    """Ranks of a store's entries. `written` in its calls is the tick of the last append to an entry's segment."""

    def __init__(self, limit: int = 1 << 18) -> None:
        """`limit`: entries remembered one by one (about 250 B each); the lowest are forgotten first."""
        self.horizon = 0
        """Rank below which entries were given up; Pressure raises it, it never falls."""
        self._limit = limit
        self._entries: dict[Key, _Heated] = {}

    def touch(self, prefix: Sequence[tuple[Key, int]], now: float, *, hit: bool = True) -> None:
        """A prefix was used: (key, position at its end in tokens), prefix first, its snapshot last.

        `hit` False: it was computed again although it was there (its own prefix was missing), which counts as a write.
        """
        ticks = tick(now)
        ahead = self.age(ticks) // 2 if hit else 0
        floor = 0
        for key, tokens in reversed(prefix):
            known = self._entries.get(key)
            rank = max(rank_at(ticks + ahead, tokens), floor, known.rank if known is not None else 0)
            floor = rank
            if known is None:
                self._entries[key] = _Heated(rank, ticks)
            else:
                known.rank, known.last_use = rank, max(known.last_use, ticks)
        if len(self._entries) > self._limit:
            self._forget_lowest()

    def hold(self, key: Key, written: int) -> None:
        """The entry is about to be appended elsewhere: its rank and last use go along."""
        if key not in self._entries:
            self._entries[key] = _Heated(rank_at(written), written)

    def rank(self, key: Key, written: int) -> int:
        entry = self._entries.get(key)
        return entry.rank if entry is not None else rank_at(written)

    def last_use(self, key: Key, written: int) -> float:
        """Unix seconds of the last use, or write."""
        entry = self._entries.get(key)
        return (entry.last_use if entry is not None else written) / TICKS_PER_S

    def forget(self, keys: Iterable[Key]) -> None:
        """These entries are gone."""
        for key in keys:
            self._entries.pop(key, None)

    def remembered(self) -> Collection[Key]:
        """Entries remembered one by one."""
        return self._entries.keys()

    def age(self, ticks: int) -> int:
        """Ticks that the least recent of the kept entries lies back; 0 while nothing was given up."""
        return max(ticks - ticks_of(self.horizon), 0) if self.horizon else 0

    def _forget_lowest(self) -> None:
        by_rank = sorted(self._entries, key=lambda key: self._entries[key].rank)
        for key in by_rank[: len(by_rank) // 4]:
            del self._entries[key]
