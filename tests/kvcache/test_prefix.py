"""Prefix reuse against a brute-force twin over random histories (L4)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kvcache.cache_events import Tier
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.event_log import EventLog, Source
from headrace.kvcache.keys import block_keys, snapshot_key
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.pool import KVPool, OutOfRows
from headrace.kvcache.prefix import PrefixCache, PrefixMatch, reuse_limit
from headrace.kvcache.region import PoolError
from tests.kvcache.small_layouts import V3, V41

BLOCK = V41.block_tokens
ROOT = b"r" * 32


def prompt(blocks: str) -> list[int]:
    """One block of equal ids per letter."""
    return [ord(letter) for letter in blocks for _ in range(BLOCK)]


def keys_of(blocks: str) -> tuple[bytes, ...]:
    return block_keys(ROOT, prompt(blocks), BLOCK)


def _all_keys() -> dict[bytes, tuple[bytes, int]]:
    """Parent and end of every block that the machines below can make."""
    found: dict[bytes, tuple[bytes, int]] = {}
    for length in range(1, 5):
        for letters in itertools.product("ab", repeat=length):
            chain = (ROOT, *keys_of("".join(letters)))
            found |= {key: (chain[at], (at + 1) * BLOCK) for at, key in enumerate(chain[1:])}
    return found


ALL_KEYS = _all_keys()
ALL_SNAPSHOTS = {snapshot_key(key, V41.ring_tokens): end for key, (_, end) in ALL_KEYS.items()}


def brute_force(pool: KVPool, keys: tuple[bytes, ...], limit: int) -> int:
    """Twin: try every P from the longest down, asking for each block and the snapshot one by one."""
    for count in range(len(keys), 0, -1):
        if count * BLOCK > limit:
            continue
        blocks = all(pool.row_region.find(key) is not None for key in keys[:count])
        ring = pool.layout.ring_tokens
        snapshot = (
            not pool.layout.has_snapshots or pool.snapshot_region.find(snapshot_key(keys[count - 1], ring)) is not None
        )
        if blocks and snapshot:
            return count * BLOCK
    return 0


class Requests(RuleBasedStateMachine):
    """Requests over a small alphabet of blocks come, reuse, compute, commit, snapshot, push, and go in any order."""

    layout: KVLayout = V41

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(self.layout, num_rows=8, num_slots=3 if self.layout.slot_bytes else 0, num_snapshots=3)
        self.cache = PrefixCache(self.pool)
        self.log = EventLog(Source("worker", "1"), BLOCK)
        self.cache.announce_to(self.log.append)
        self.live: dict[str, tuple[str, list[int]]] = {}
        self.pushes: set[str] = set()
        self.count = 0

    def fill(self, row: int, key: bytes) -> None:
        self.pool.rows[row, :32] = torch.frombuffer(bytearray(key), dtype=torch.uint8)

    @rule(blocks=st.text("ab", min_size=1, max_size=4), slack=st.integers(0, 2 * BLOCK))
    def admit(self, blocks: str, slack: int) -> None:
        owner = f"request-{self.count}"
        self.count += 1
        keys = keys_of(blocks)
        limit = len(blocks) * BLOCK - slack
        expected = brute_force(self.pool, keys, limit)
        looked = self.cache.lookup(keys, limit)
        match = self.cache.acquire(keys, limit, owner)
        assert looked == match
        assert match.tokens == expected <= max(limit, 0)
        assert len(match.rows) * BLOCK == match.tokens
        for row, key in zip(match.rows, keys, strict=False):
            assert bytes(self.pool.rows[row, :32].tolist()) == key, "a hit has the bytes of its key"
        if match.snapshot is not None:
            self.pool.release_snapshot(match.snapshot, owner)
        rows = list(match.rows)
        try:
            rows += self.pool.allocate_rows(len(blocks) - len(rows), owner)
        except OutOfRows:
            self.pool.release_owner(owner)
            return
        for row, key in zip(rows[len(match.rows) :], keys[len(match.rows) :], strict=True):
            self.fill(row, key)
        self.live[owner] = (blocks, rows)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), snapshot_at=st.integers(0, 4))
    def commit(self, data: st.DataObject, snapshot_at: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.live)))
        blocks, rows = self.live[owner]
        keys = keys_of(blocks)
        present = [self.pool.row_region.find(key) for key in keys]
        canonical = self.cache.commit(keys, rows, owner, parent=ROOT)
        for before, row, now in zip(present, rows, canonical, strict=True):
            assert now == (row if before is None else before)
        assert self.pool.row_region.held_by(owner) == set(canonical)
        self.live[owner] = (blocks, list(canonical))
        if 0 < snapshot_at <= len(blocks) and self.layout.has_snapshots:
            slot = self.pool.allocate_slot(owner)
            kept = self.cache.commit_snapshot(keys[snapshot_at - 1], slot, end_tokens=snapshot_at * BLOCK)
            assert kept == (self.cache.find_snapshot(keys[snapshot_at - 1]) is not None)
            assert kept, "nothing holds snapshots here, so there is always a place"
            self.pool.release_slot(slot, owner)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.live)))
        self.pool.row_region.pin(self.live[owner][1], owner)
        self.pushes.add(owner)

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def terminal(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.pushes)))
        self.pool.row_region.unpin(owner)
        self.pushes.discard(owner)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.live)))
        self.pool.release_rows(self.live.pop(owner)[1], owner)

    @rule(blocks=st.text("ab", min_size=1, max_size=4))
    def forget(self, blocks: str) -> None:
        key = keys_of(blocks)[-1]
        self.cache.forget(key)
        assert self.pool.row_region.find(key) is None

    @rule(sure=st.integers(0, 3))
    def forget_all(self, sure: int) -> None:
        if sure == 0:
            count = self.cache.count()
            assert self.cache.forget_all() == count
            assert self.cache.count() == (0, 0)

    @invariant()
    def sound(self) -> None:
        """L11, and L4: rows that a request or a push still reads keep their place."""
        report = self.pool.integrity()
        assert report.problems == ()
        assert report.idle == (not self.live and not self.pushes)
        for owner, (_, rows) in self.live.items():
            assert self.pool.row_region.held_by(owner) == set(rows)

    @invariant()
    def told(self) -> None:
        """L24: the events say what is findable here, with each block's parent and position."""
        here = {key for key in ALL_KEYS if self.pool.row_region.find(key) is not None}
        places = {key for key in ALL_SNAPSHOTS if self.pool.snapshot_region.find(key) is not None}
        told: dict[EntryKind, dict[bytes, tuple[bytes | None, int]]] = {kind: {} for kind in EntryKind}
        for stored in self.log.snapshot().entries:
            assert stored.tier is Tier.DEVICE
            parent, end = stored.parent, stored.end_tokens - (len(stored.keys) - 1) * BLOCK
            for key in stored.keys:
                told[stored.kind][key] = (parent, end)
                parent, end = key, end + BLOCK
        assert told[EntryKind.BLOCK] == {key: ALL_KEYS[key] for key in here}
        assert told[EntryKind.SNAPSHOT] == {key: (None, ALL_SNAPSHOTS[key]) for key in places}


class RequestsWithoutSnapshots(Requests):
    layout = V3


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRequestsWithoutSnapshots = RequestsWithoutSnapshots.TestCase
TestRequestsWithoutSnapshots.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def filled(layout: KVLayout, blocks: str, snapshots_at: tuple[int, ...] = ()) -> PrefixCache:
    cache = PrefixCache(KVPool(layout, num_rows=10, num_slots=3, num_snapshots=3))
    rows = cache.pool.allocate_rows(len(blocks), "w")
    cache.commit(keys_of(blocks), rows, "w")
    cache.pool.release_rows(rows, "w")
    for position in snapshots_at:
        slot = cache.pool.allocate_slot("w")
        cache.commit_snapshot(keys_of(blocks)[position - 1], slot)
        cache.pool.release_slot(slot, "w")
    return cache


def test_blocks_without_a_snapshot_are_no_prefix() -> None:
    """L4: blocks [0, P) and the snapshot at P, or nothing."""
    keys = keys_of("abc")
    assert filled(V41, "abc").lookup(keys, 999).tokens == 0
    assert filled(V41, "abc", (2,)).lookup(keys, 999).tokens == 2 * BLOCK
    assert filled(V41, "abc", (1, 2)).lookup(keys, 2 * BLOCK - 1).tokens == BLOCK
    assert filled(V41, "abc", (2,)).lookup(keys, 2 * BLOCK - 1) == PrefixMatch(0, (), None)


def test_a_snapshot_without_its_blocks_is_no_prefix() -> None:
    """L4: a hole in the blocks ends the prefix, whatever lies behind it."""
    cache = filled(V41, "abc", (1, 3))
    cache.pool.row_region.forget(keys_of("abc")[1])
    assert cache.lookup(keys_of("abc"), 999).tokens == BLOCK


def test_v3_uses_every_boundary_up_to_the_last_token() -> None:
    cache = filled(V3, "abc")
    assert cache.lookup(keys_of("abc"), reuse_limit(V3, 3 * BLOCK, 0)).tokens == 2 * BLOCK
    assert cache.lookup(keys_of("abd"), reuse_limit(V3, 3 * BLOCK + 1, 0)).tokens == 2 * BLOCK
    assert cache.lookup(keys_of("abc"), reuse_limit(V3, 3 * BLOCK + 1, 0)).tokens == 3 * BLOCK


@given(st.integers(0, 500), st.integers(0, 200))
def test_reuse_limit(prompt_tokens: int, keep: int) -> None:
    """spec §18.4: P ≤ N₀ − K; without snapshots one token is always computed."""
    assert reuse_limit(V41, prompt_tokens, keep) == max(prompt_tokens - keep, 0)
    assert reuse_limit(V3, prompt_tokens, keep) == max(prompt_tokens - 1, 0)


def test_decode_holds_leading_blocks_without_snapshots() -> None:
    """Reserve lists leading blocks that decode has; the slot comes from prefill."""
    cache = filled(V41, "abc")
    assert len(cache.acquire_blocks(keys_of("abd"), "d")) == 2
    assert len(cache.acquire_blocks(keys_of("abc"), "e", max_blocks=1)) == 1
    assert cache.pool.row_region.references(cache.acquire_blocks(keys_of("a"), "f")[0]) == 3


def test_nothing_is_evicted_while_a_request_reads_it() -> None:
    """L4: acquired rows and the snapshot outlive any pressure."""
    cache = filled(V41, "abc", (3,))
    match = cache.acquire(keys_of("abc"), 999, "reader")
    with pytest.raises(OutOfRows):
        cache.pool.allocate_rows(7, "greedy")
    assert cache.clear() == 0
    assert cache.lookup(keys_of("abc"), 999) == match


def test_a_duplicate_moves_to_the_canonical_row() -> None:
    cache = filled(V3, "ab")
    first = cache.acquire_blocks(keys_of("ab"), "reader")
    rows = cache.pool.allocate_rows(2, "twin")
    cache.pool.row_region.pin(rows[:1], "push")
    assert cache.commit(keys_of("ab"), rows, "twin") == first
    assert cache.pool.row_region.integrity().draining == 1, "the pushed duplicate waits for its transfer (L7)"
    cache.pool.row_region.unpin("push")
    cache.pool.release_rows(first, "twin")
    cache.pool.release_rows(first, "reader")
    assert cache.pool.integrity().idle


def test_commit_refuses_rows_of_others() -> None:
    cache = filled(V3, "ab")
    rows = cache.pool.allocate_rows(2, "a")
    with pytest.raises(PoolError):
        cache.commit(keys_of("ab"), rows, "b")
    with pytest.raises(PoolError):
        cache.commit(keys_of("ab"), rows[:1], "a")


def test_snapshot_places_are_reused_but_never_under_a_reader() -> None:
    cache = filled(V41, "abcd", (1, 2, 3))
    assert cache.pool.snapshot_region.cached == 3
    held = cache.acquire(keys_of("a"), 999, "reader")
    slot = cache.pool.allocate_slot("w")
    assert cache.commit_snapshot(keys_of("abcd")[3], slot)
    assert held.snapshot == cache.find_snapshot(keys_of("a")[0])
    assert cache.find_snapshot(keys_of("ab")[1]) is None
    assert cache.commit_snapshot(keys_of("abcd")[3], slot), "present already"
    cache.acquire(keys_of("abc"), 999, "reader-2")
    cache.acquire(keys_of("abcd"), 999, "reader-3")
    assert not cache.commit_snapshot(keys_of("x")[0], slot), "every place is read: go on without"
    assert not PrefixCache(KVPool(V3, num_rows=2)).commit_snapshot(keys_of("a")[0], 0)


def test_restored_windows_are_the_committed_ones() -> None:
    cache = filled(V41, "a")
    slot = cache.pool.allocate_slot("w")
    cache.pool.slots[slot].fill_(9)
    cache.commit_snapshot(keys_of("a")[0], slot)
    cache.pool.slots[slot].fill_(1)
    match = cache.acquire(keys_of("a"), 999, "r")
    assert match.snapshot is not None
    fresh = cache.pool.allocate_slot("r")
    cache.pool.restore_snapshot(match.snapshot, fresh)
    assert (cache.pool.slots[fresh, : V41.snapshot_bytes] == 9).all()
