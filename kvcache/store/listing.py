"""A store's contents as events: what a snapshot of its event log tells (event_log.py, `contents`)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from headrace.kvcache.cache_events import Stored, Tier
from headrace.kvcache.store.base import Store

LISTING_SECONDS = 300.0
"""Longest listing of an index."""


def stored_events(store: Store) -> Iterator[Stored]:
    """One event per entry: an index knows no parents. Raises StoreError when it does not answer."""
    for entry in store.entries(time.monotonic() + LISTING_SECONDS):
        yield Stored(entry.kind, Tier.STORE, (entry.key,), None, entry.tokens, entry.length, entry.bucket)
