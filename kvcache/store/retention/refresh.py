"""Which entries of a used prefix are written again so that they live on (spec/kv_tier.md, Retention).

After a use every entry of the prefix has at least half of its class's life left: what has less is re-appended into a
fresh bucket, blocks and snapshot together. What is younger stays where it is; rewriting the whole prefix whenever one
block of it is old would rewrite shared roots at every use and buys no hit. An entry that a longer class uses is
re-appended there; a shorter class never shortens a life. BATCH uses are not told to the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.keys import Key
from headrace.kvcache.store.retention.classes import NEVER, Lives, expired, longer


@dataclass(frozen=True, slots=True)
class UsedEntry:
    """An entry of a used prefix, as the index has it."""

    key: Key
    retention: RetentionClass
    expires_at: float
    """Wall clock; NEVER for pinned ones."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """Write this entry again, as this class."""

    key: Key
    retention: RetentionClass


def refreshed_class(
    lives: Lives, retention: RetentionClass, expires_at: float, used_by: RetentionClass, now: float
) -> RetentionClass | None:
    """The class to re-append an entry as when it is used, or None to leave it. Expired entries are left: their bytes
    may be unlinked at any moment."""
    if expired(expires_at, now):
        return None
    target = longer(retention, used_by)
    if target != retention:
        return target
    if expires_at != NEVER and expires_at - now < lives.half(retention):
        return target
    return None


class Refresher:
    """Turns uses into batches and remembers what is in flight, so that a burst of hits rewrites an entry once.

    Not thread-safe: its owner holds a lock or is one thread.
    """

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._in_flight: dict[Key, RetentionClass] = {}

    def plan(self, used: Sequence[UsedEntry], used_by: RetentionClass, now: float) -> tuple[Refresh, ...]:
        """One batch for one used prefix (prefix first, snapshot with it), in the given order. What it names is in
        flight until `done`."""
        batch = []
        for entry in used:
            target = refreshed_class(self._lives, entry.retention, entry.expires_at, used_by, now)
            if target is None:
                continue
            flying = self._in_flight.get(entry.key)
            if flying is not None and longer(flying, target) == flying:
                continue
            self._in_flight[entry.key] = target
            batch.append(Refresh(entry.key, target))
        return tuple(batch)

    def done(self, batch: Sequence[Refresh]) -> None:
        """The batch is durable, or was given up: its entries may be refreshed again."""
        for refresh in batch:
            if self._in_flight.get(refresh.key) == refresh.retention:
                del self._in_flight[refresh.key]

    @property
    def in_flight(self) -> int:
        """Entries being re-appended; zero at idle (L11)."""
        return len(self._in_flight)
