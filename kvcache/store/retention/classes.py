"""How long an entry of each class lives, and the bucket it expires with (spec/kv_tier.md, Retention).

Expiry is by bucket: all entries of a bucket end in the same second, so that a whole directory of segments is unlinked
at once. An entry written at t lives until the first bucket end at or after t + life: never shorter than its class says,
longer by less than one bucket. BATCH traffic stores nothing and has no class here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headrace.kvcache.entries import RetentionClass

HOUR = 3_600
DAY = 24 * HOUR
NEVER = 0
"""Bucket and expires_at of pinned entries, as IndexRow and segment paths write it."""


@dataclass(frozen=True, slots=True)
class Life:
    """The time to live of one class."""

    life_s: int
    """Seconds from the last write or refresh; 0: for ever."""
    bucket_s: int
    """Width of an expiry bucket."""

    def __post_init__(self) -> None:
        if self.life_s < 0 or self.bucket_s < 1 or (self.life_s and self.bucket_s > self.life_s):
            raise ValueError(
                f"a life of {self.life_s} s in buckets of {self.bucket_s} s: a bucket takes at least a second and at "
                "most the life"
            )


DEFAULT_LIVES: Mapping[RetentionClass, Life] = MappingProxyType(
    {
        RetentionClass.AGENT: Life(3 * DAY, HOUR),
        RetentionClass.CHAT: Life(7 * DAY, 4 * HOUR),
        RetentionClass.PINNED: Life(0, HOUR),
    }
)
_ORDER = (RetentionClass.AGENT, RetentionClass.CHAT, RetentionClass.PINNED)


@dataclass(frozen=True, slots=True)
class Lives:
    """The lives of all classes; a longer class never has a shorter life."""

    of: Mapping[RetentionClass, Life]

    def __post_init__(self) -> None:
        if set(self.of) != set(RetentionClass):
            raise ValueError(f"lives are needed for {[c.name for c in RetentionClass]}")
        spans = [self.of[retention].life_s or math.inf for retention in _ORDER]
        if spans != sorted(spans):
            raise ValueError(f"lives must grow in the order {[c.name for c in _ORDER]}; they are {spans} seconds")

    def bucket(self, retention: RetentionClass, now: float) -> int:
        """Unix second at which an entry of this class written at `now` ends: its bucket's name and its expires_at;
        NEVER for a class without end."""
        life = self.of[retention]
        if life.life_s == 0:
            return NEVER
        return math.ceil((now + life.life_s) / life.bucket_s) * life.bucket_s

    def half(self, retention: RetentionClass) -> float:
        """Seconds of life left under which a hit refreshes."""
        return self.of[retention].life_s / 2


DEFAULT = Lives(DEFAULT_LIVES)


def longer(a: RetentionClass, b: RetentionClass) -> RetentionClass:
    """The class that lives longer: an entry lives as long as the longest class that used it."""
    return max(a, b, key=_ORDER.index)


def expired(expires_at: float, now: float) -> bool:
    """Whether an entry or bucket has ended. Readers and the sweeper ask the same question, so that nothing is read
    from a bucket that may be unlinked."""
    return expires_at != NEVER and now >= expires_at
