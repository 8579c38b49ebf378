"""The store's index as the router asks it: one call, never waited for long, dead once (L12, L17)."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.kvcache.entries import EntryKind, RetentionClass
from headrace.kvcache.index.base import IndexRow, IndexUnavailable
from headrace.kvcache.index.open import SQLITE_FILE
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.keys import Key
from headrace.router.ranks import RankNumbers
from headrace.router.request import RoutingRequest
from headrace.services.router.prefixes import Prefixes
from headrace.services.router.settings import IndexSection
from headrace.services.router.store_lookup import AT_ONCE, StoreLookup, open_lookup
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.settings_load import SettingsError

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(8)]


def row(key: Key, expires_at: int = 0) -> IndexRow:
    return IndexRow(key, "group", 0, 10, EntryKind.BLOCK, RetentionClass.CHAT, 16, expires_at, bytes(16))


class FakeIndex:
    """Answers when it is allowed to."""

    def __init__(self, present: Sequence[Key] = ()) -> None:
        self.present = set(present)
        self.calls: list[list[Key]] = []
        self.fails = False
        self.open = threading.Event()
        self.open.set()

    def get_many(self, keys: Sequence[Key], deadline: float) -> list[IndexRow | None]:
        self.calls.append(list(keys))
        assert self.open.wait(30.0)
        if self.fails:
            raise IndexUnavailable("down")
        return [row(key) if key in self.present else None for key in keys]

    def close(self) -> None:
        pass


def lookup(index: Any, **changes: Any) -> StoreLookup:
    return StoreLookup(lambda: index, **changes)


def request(blocks: Sequence[Key]) -> RoutingRequest:
    return RoutingRequest("r", 4 * len(blocks) + 1, 1, 1, 0, b"", 1e9, blocks=blocks, usable_tokens=4 * len(blocks))


def prefixes(index: Any, deadline_ms: int = 30_000) -> Prefixes:
    made = Prefixes(IndexSection(deadline_ms=deadline_ms), RankNumbers(), SystemClock(), lookup(index))
    made._block_tokens = 4
    return made


async def test_one_call_for_a_prompt_and_none_for_its_repetition() -> None:
    """L24: misses ask the shared index in one variadic call; what it said is remembered."""
    index = FakeIndex(KEYS[:5])
    known = prefixes(index)
    try:
        match = await known.match(request(KEYS), 1e9)
        assert match.shared == 5
        assert (await known.match(request(KEYS), 1e9)).shared == 5
        assert index.calls == [KEYS]
    finally:
        await known.close()


async def test_a_late_answer_is_learned_and_not_waited_for() -> None:
    """L17: the request goes on without it; the next one has it."""
    index = FakeIndex(KEYS)
    index.open.clear()
    known = prefixes(index, deadline_ms=1)
    try:
        assert (await known.match(request(KEYS), 1e9)).shared == 0
        assert known.store_misses["late"] == 1
        index.open.set()
        await asyncio.gather(*known._asking)
        assert known.local(request(KEYS)).shared == 8
    finally:
        index.open.set()
        await known.close()


async def test_a_dead_index_is_found_dead_once() -> None:
    """L17: decided once per dead target; when it is back, it is asked again."""
    now = [0.0]
    index = FakeIndex(KEYS)
    index.fails = True
    asked = lookup(index, monotonic=lambda: now[0])
    try:
        assert await asked.present(KEYS) is None
        assert await asked.present(KEYS) is None
        assert len(index.calls) == 1
        assert asked.unanswered == {"unavailable": 1, "breaker": 1}
        index.fails, now[0] = False, 60.0
        assert await asked.present(KEYS[:2]) == [True, True]
    finally:
        await asked.close()


async def test_calls_under_way_are_bounded() -> None:
    """L12: a hanging index does not gather questions."""
    index = FakeIndex(KEYS)
    index.open.clear()
    asked = lookup(index)
    try:
        waiting = [asyncio.create_task(asked.present(KEYS)) for _ in range(AT_ONCE)]
        await asyncio.sleep(0)
        assert await asked.present(KEYS) is None
        assert asked.unanswered == {"busy": 1}
        index.open.set()
        assert all(await asyncio.gather(*waiting))
    finally:
        index.open.set()
        await asked.close()


async def test_reads_the_index_that_workers_write(tmp_path: Path) -> None:
    """The router makes no index of its own, and entries whose time is over are absent."""
    asked = open_lookup(IndexSection(store=f"file://{tmp_path}"))
    assert asked is not None
    try:
        assert await asked.present(KEYS[:2]) is None
        assert asked.unanswered == {"no_index": 1}
        assert not (tmp_path / SQLITE_FILE).exists()
        written = SqliteIndex(tmp_path / SQLITE_FILE)
        past, future = int(time.time()) - 10, int(time.time()) + 1000
        written.put_many([row(KEYS[0], future), row(KEYS[1], past), row(KEYS[2])], time.monotonic() + 30)
        assert await asked.present(KEYS[:4]) == [True, False, True, False]
        written.remove_many([row(KEYS[2])], time.monotonic() + 30)
        assert await asked.present(KEYS[2:3]) == [False]
        written.close()
    finally:
        await asked.close()


def test_needs_to_know_where_the_index_is() -> None:
    assert open_lookup(IndexSection()) is None
    with pytest.raises(SettingsError, match=r"set index\.store_index"):
        open_lookup(IndexSection(store="seaweedfs://one:9333"))
