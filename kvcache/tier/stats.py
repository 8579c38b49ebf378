"""What loader and writer say of themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class LoaderStats:
    """Since start."""

    loads: Counter[str] = field(default_factory=Counter)
    """By outcome (LoadOutcome.reason)."""
    asked_tokens: int = 0
    """Tokens of prefixes that loads asked the tiers for."""
    hit_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of the blocks that were brought, by source."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Payload that was brought, by source."""
    misses: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By source and cause."""
    seconds: float = 0.0
    """Spent in loads."""


@dataclass(frozen=True)
class WriterStats:
    """Since start, and sizes of now."""

    blocks: int = 0
    snapshots: int = 0
    """Offered by the engine."""
    copied_bytes: int = 0
    """Read from the device pool."""
    host_entries: int = 0
    """Put into the host tier, or there already."""
    accepted: int = 0
    """Taken by the store."""
    known: int = 0
    """Were in the store already, and were touched instead."""
    refused: int = 0
    """Not taken by the store: its queue or a quota is full."""
    durable: int = 0
    lost: int = 0
    """Taken and not written in the end."""
    failed: int = 0
    """Writes that raised; logged."""
    queued: int = 0
    """Offers that wait for their copy."""
    in_flight: int = 0
    """Entries that the store has taken and not made durable."""
    uses_dropped: int = 0
    """Uses of a prefix that the store was not told of, since too many waited."""
