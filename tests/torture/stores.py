"""Stores under torture: small segments and short groups, so that everything happens often."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from headrace.kvcache.entries import GetResult
from headrace.kvcache.index.base import Index
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import PutTicket, Store
from headrace.kvcache.store.files import FileLayer
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.settings import SegmentSettings
from tests.torture.oracle import judge

START = 1_800_000_000.0
_boots = itertools.count(1)


class Wall:
    """A wall clock that the torture turns."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def settings(**changes: Any) -> SegmentSettings:
    """Segments of 128 KiB, groups of 32 KiB or a few milliseconds; a boot id that was never used."""
    small: dict[str, Any] = {
        "node": "torture",
        "boot": f"{next(_boots):08x}",
        "segment_bytes": 128 << 10,
        "queue_bytes": 1 << 20,
        "read_buffer_bytes": 4 << 20,
        "read_threads": 2,
        "read_bytes": 64 << 10,
        "write_bytes": 32 << 10,
        "sync_bytes": 32 << 10,
        "sync_interval_s": 0.005,
        "sync_idle_s": 0.001,
    }
    return SegmentSettings(**(small | changes))


def open_segments(files: FileLayer, index: Index, wall: Callable[[], float], **changes: Any) -> SegmentStore:
    """A segment store on that layer and index."""
    return SegmentStore(files, index, settings(**changes), wall=wall)


def soon(seconds: float = 60.0) -> float:
    """A deadline that nothing here should meet."""
    return time.monotonic() + seconds


def acknowledged(puts: list[tuple[list[Key], PutTicket]]) -> set[Key]:
    """Keys whose durability was promised. Every ticket is settled by now, or will never be."""
    sure: set[Key] = set()
    for keys, ticket in puts:
        outcome: Future[tuple[bool, ...]] = ticket.durable
        if outcome.done():
            sure.update(key for key, good in zip(keys, outcome.result(), strict=True) if good)
    return sure


def read(store: Store, keys: list[Key], batch: int = 64) -> tuple[set[Key], int]:
    """What comes of those keys, judged; and how many misses."""
    came: set[Key] = set()
    misses = 0
    for start in range(0, len(keys), batch):
        part = keys[start : start + batch]
        results: list[GetResult] = list(store.get_many(part, soon()))
        right, missed = judge(part, results)
        came |= right
        misses += missed
    return came, misses
