"""What a source of cache events says, as the router takes it: typed, numbered, keys only (L25).

The wire's events are translated where they arrive (services/router/cache_feed.py); nothing here knows messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kvcache.keys import Key
from headrace.router.index.base import HolderTier

BOTH_TIERS = HolderTier.DEVICE | HolderTier.HOST


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks or snapshots are readable in a tier."""

    tier: HolderTier
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """They are gone from it."""

    tier: HolderTier
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is left in it."""

    tier: HolderTier


Change = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Numbered:
    """One event of a source."""

    sequence: int
    """From 1, rising by one in one incarnation."""
    change: Change | None
    """None: one that this router does not know; its number counts."""


def weight(change: Change | None) -> int:
    """Keys in it, at least 1."""
    return max(1, len(change.keys)) if isinstance(change, Stored | Removed) else 1
