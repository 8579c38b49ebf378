"""What tiers say about their contents: keys only, never token ids (L25). Types; the log that numbers them is apart."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from headrace.kvcache.entries import EntryKind
from headrace.kvcache.keys import Key


class Tier(enum.IntEnum):
    """Where an entry lies; numbers are the wire's (control.proto, CacheTier)."""

    DEVICE = 1
    HOST = 2
    STORE = 3


@dataclass(frozen=True, slots=True)
class Stored:
    """Entries that are there and readable (store: durable). `keys` chain: each one's parent is the one before it."""

    kind: EntryKind
    tier: Tier
    keys: tuple[Key, ...]
    parent: Key | None
    """Parent of the first block; None for snapshots."""
    end_tokens: int
    """Position at the end of the last entry."""
    entry_bytes: int
    bucket: str = ""
    """Retention bucket, store only."""


@dataclass(frozen=True, slots=True)
class Removed:
    kind: EntryKind
    tier: Tier
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class BucketDropped:
    bucket: str


@dataclass(frozen=True, slots=True)
class NamespaceDropped:
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    tier: Tier


CacheChange = Stored | Removed | BucketDropped | NamespaceDropped | Cleared
EventSink = Callable[[CacheChange], None]
"""Called by a tier after the change is true; any thread; must not block."""


def ignore_events(_: CacheChange) -> None:
    """The sink of a tier nobody watches."""
