"""Loads: whole prefixes or nothing, prefix first, one deadline, every payload given back (L3, L4, L7, L17)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvcache.entries import EntryKind, Miss
from headrace.kvcache.keys import Key, block_keys, snapshot_key
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.tier.load import LoadOutcome, LoadSettings
from headrace.kvcache.tier.loader import TierLoader
from headrace.kvcache.tier.plan import Wanted
from tests.kvcache.tier.fakes import FakePool, FakeSource, until
from tests.kvcache.tier.test_plan import BLOCK, V3, V41, usable

COUNT = 8
KEYS = block_keys(bytes(32), list(range(BLOCK * COUNT)), BLOCK)
TWO_BLOCKS = LoadSettings(
    deadline_s=20.0, least_tokens=0, read_bytes=2 * max(V3.block_bytes, V41.block_bytes), window=2
)


@pytest.fixture(params=[V3, V41], ids=["rows", "snapshots"])
def layout(request: pytest.FixtureRequest) -> KVLayout:
    layout: KVLayout = request.param
    return layout


def block(layout: KVLayout, index: int) -> bytes:
    return bytes([index + 1]) * layout.block_bytes


def mark(layout: KVLayout, count: int) -> Key:
    """Key of the snapshot behind `count` blocks."""
    return snapshot_key(KEYS[count - 1], layout.ring_tokens)


def filled(
    layout: KVLayout, blocks: Sequence[int] = range(COUNT), snapshots: Sequence[int] = (3, COUNT), name: str = "store"
) -> FakeSource:
    """A source with these blocks, and the snapshots behind so many blocks."""
    source = FakeSource(name)
    for index in blocks:
        source.add(KEYS[index], EntryKind.BLOCK, (index + 1) * BLOCK, block(layout, index))
    for count in snapshots if layout.has_snapshots else ():
        payload = bytes([100 + count]) * layout.snapshot_bytes
        source.add(mark(layout, count), EntryKind.SNAPSHOT, count * BLOCK, payload)
    return source


def wanted(layout: KVLayout, present: Sequence[int] = (), snapshots: Sequence[int] = (), room: int = 1 << 20) -> Wanted:
    """All blocks, of which the pool has some."""
    at = {count * BLOCK for count in snapshots} if layout.has_snapshots else set()
    now = usable(layout, set(present), at, COUNT)
    return Wanted(KEYS, tuple(index in present for index in range(COUNT)), tuple(sorted(at)), now, room)


def load(
    layout: KVLayout,
    sources: Sequence[FakeSource],
    what: Wanted | None = None,
    pool: FakePool | None = None,
    options: LoadSettings = TWO_BLOCKS,
    token_seconds: Callable[[], float | None] = lambda: None,
) -> tuple[LoadOutcome, FakePool]:
    pool = pool or FakePool()
    loader = TierLoader(sources, layout, options, token_seconds=token_seconds)
    outcome = loader.load(what or wanted(layout), pool)
    loader.close()
    for source in sources:
        if source.gate is None:
            until(lambda each=source: each.lent == 0)  # type: ignore[misc]
    return outcome, pool


def test_a_whole_prefix_comes_in_order(layout: KVLayout) -> None:
    """Every block, prefix first, then the one snapshot that makes it usable; bytes as stored."""
    outcome, pool = load(layout, [filled(layout)])
    assert (outcome.reason, outcome.tokens) == ("loaded", COUNT * BLOCK)
    blocks = [entry for entry in pool.adopted if entry[1] is EntryKind.BLOCK]
    assert blocks == [(KEYS[index], EntryKind.BLOCK, block(layout, index)) for index in range(COUNT)]
    snapshots = pool.adopted[COUNT:]
    assert [key for key, _, _ in snapshots] == ([mark(layout, COUNT)] if layout.has_snapshots else [])
    size = COUNT * layout.block_bytes + layout.snapshot_bytes
    assert (outcome.nbytes, dict(outcome.blocks_by_source)) == (size, {"store": COUNT})


def test_each_block_comes_from_the_first_that_has_it(layout: KVLayout) -> None:
    """Union over the sources, in their order; a failed read is tried behind."""
    host = filled(layout, range(4), [], "host")
    host.fail = lambda key: Miss.DIGEST if key == KEYS[1] else None
    peer = filled(layout, range(2, 6), [], "peer")
    store = filled(layout)
    outcome, pool = load(layout, [host, peer, store])
    assert outcome.tokens == COUNT * BLOCK
    assert dict(outcome.blocks_by_source) == {"host": 3, "peer": 2, "store": 3}
    assert [payload for _, kind, payload in pool.adopted if kind is EntryKind.BLOCK] == [
        block(layout, index) for index in range(COUNT)
    ]


def test_what_came_from_elsewhere_is_kept(layout: KVLayout) -> None:
    """The own host tier gets what peers and the store brought, once, while it is lent."""
    host, store = filled(layout, range(3), [], "host"), filled(layout)
    kept: dict[Key, bytes] = {}
    loader = TierLoader(
        [host, store], layout, TWO_BLOCKS, keep=lambda info, payload: kept.update({info.key: bytes(payload)})
    )
    loader.load(wanted(layout), FakePool())
    loader.close()
    marks = [mark(layout, COUNT)] if layout.has_snapshots else []
    assert list(kept) == [*KEYS[3:], *marks]
    assert all(kept[KEYS[index]] == block(layout, index) for index in range(3, COUNT))


def test_nothing_that_is_here_is_fetched(layout: KVLayout) -> None:
    """The pool's blocks and snapshots are used; without a gain nothing is read."""
    store = filled(layout)
    outcome, pool = load(layout, [store], wanted(layout, range(4), [3]))
    assert {key for key, kind, _ in pool.adopted if kind is EntryKind.BLOCK} == set(KEYS[4:])
    assert outcome.tokens == COUNT * BLOCK
    outcome, pool = load(layout, [store], wanted(layout, range(COUNT), [COUNT]))
    assert (outcome.reason, pool.adopted) == ("absent", [])


def test_an_entry_that_is_not_what_was_asked_for_is_a_miss(layout: KVLayout) -> None:
    """L1, L3: key, kind, position and length are compared, whatever the source says of itself."""
    for change in ({"tokens": 2 * BLOCK}, {"kind": EntryKind.SNAPSHOT}, {"key": KEYS[5]}, {"length": 7}):
        store = filled(layout)
        info, payload = store.entries[KEYS[4]]
        store.entries[KEYS[4]] = (replace(info, **change), payload)  # type: ignore[arg-type]
        outcome, pool = load(layout, [store])
        assert KEYS[4] not in {key for key, _, _ in pool.adopted}
        assert outcome.tokens == (3 if layout.has_snapshots else 4) * BLOCK


def test_what_came_before_a_gap_is_used(layout: KVLayout) -> None:
    """L4: a block that does not come ends the prefix; of the snapshots the best earlier one is fetched then."""
    store = filled(layout, snapshots=[2, 3, 5, COUNT])
    store.fail = lambda key: Miss.TIMEOUT if key in KEYS[6:] else None
    outcome, pool = load(layout, [store])
    assert outcome.reason == "short"
    assert outcome.tokens == (5 if layout.has_snapshots else 6) * BLOCK
    if layout.has_snapshots:
        assert pool.adopted[-1][0] == mark(layout, 5)


def test_a_bad_snapshot_is_replaced_by_an_earlier_one() -> None:
    """L3, L4: the blocks behind it are of no use then, and the load says so."""
    store = filled(V41)
    store.fail = lambda key: Miss.DIGEST if key == mark(V41, COUNT) else None
    outcome, _ = load(V41, [store])
    assert (outcome.reason, outcome.tokens) == ("short", 3 * BLOCK)


def test_the_pool_decides_how_much(layout: KVLayout) -> None:
    """L12: no more is planned than there is room for, and a refusal ends the load."""
    outcome, pool = load(layout, [filled(layout)], wanted(layout, room=4), FakePool(room=4))
    assert outcome.tokens == (3 if layout.has_snapshots else 4) * BLOCK
    outcome, pool = load(layout, [filled(layout)], pool=FakePool(room=4))
    assert outcome.tokens == (3 if layout.has_snapshots else 4) * BLOCK
    outcome, pool = load(layout, [filled(layout)], pool=FakePool(over=True))
    assert (outcome.reason, outcome.nbytes, pool.adopted) == ("over", 0, [])


def test_a_source_that_hangs_is_left_alone(layout: KVLayout) -> None:
    """L17: decided once, by the deadline; the others serve, and nothing is asked of it in the next load."""
    hanging, store = filled(layout, name="peer"), filled(layout)
    hanging.gate = threading.Event()
    loader = TierLoader([hanging, store], layout, replace(TWO_BLOCKS, deadline_s=1.0, least_bytes_per_second=1e3))
    for _ in range(2):
        outcome = loader.load(wanted(layout), FakePool())
        assert (outcome.tokens, dict(outcome.blocks_by_source)) == (COUNT * BLOCK, {"store": COUNT})
    assert loader.stats().misses[("peer", "timeout")] > 0
    hanging.gate.set()
    loader.close()
    until(lambda: hanging.lent == 0)
    assert hanging.looked_up <= 1


def test_results_that_come_too_late_are_given_back(layout: KVLayout) -> None:
    """L6, L17: a lookup in time, reads that hang: nothing is loaded, nothing stays lent."""

    class Slow(FakeSource):
        def lookup(self, keys: Sequence[Key], deadline: float) -> Sequence[bool]:
            return [key in self.entries for key in keys]

    store = Slow(entries=filled(layout).entries, gate=threading.Event())
    loader = TierLoader([store], layout, LoadSettings(deadline_s=0.5, least_tokens=0))
    outcome = loader.load(wanted(layout), FakePool())
    assert (outcome.reason, outcome.tokens, outcome.nbytes) == ("late", 0, 0)
    assert store.gate is not None
    store.gate.set()
    until(lambda: len(store.asked) >= 2 and store.lent == 0)
    loader.close()


def test_a_small_gain_is_computed(layout: KVLayout) -> None:
    """Not below the least number of tokens, and not where computing is quicker (spec/kv_tier.md)."""
    store = filled(layout)
    options = LoadSettings(deadline_s=20, least_tokens=COUNT * BLOCK + 1)
    outcome, _ = load(layout, [store], options=options)
    assert (outcome.reason, store.asked) == ("not_worth", [])
    loader = TierLoader([store], layout, TWO_BLOCKS, token_seconds=lambda: 1e-9)
    (source,) = loader._sources
    source.measured(1 << 20, 1.0)
    assert loader.load(wanted(layout), FakePool()).reason == "not_worth"
    loader.close()


def test_a_source_that_raises_is_a_miss(layout: KVLayout) -> None:
    """L17: no fault of a tier ends a request."""

    class Broken(FakeSource):
        def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[object]:  # type: ignore[override]
            raise RuntimeError("a fault")

    broken = Broken("peer", entries=filled(layout).entries)
    outcome, _ = load(layout, [broken, filled(layout)])
    assert (outcome.tokens, set(outcome.blocks_by_source)) == (COUNT * BLOCK, {"store"})


@settings(max_examples=60, deadline=None)
@given(data=st.data(), layout=st.sampled_from([V3, V41]))
def test_a_load_makes_the_longest_prefix_of_what_can_be_read(data: st.DataObject, layout: KVLayout) -> None:
    """L4: whatever the sources say, lack and fail at, the outcome is the longest whole prefix of pool and adopted
    entries, nothing is adopted that does not fit, and nothing stays lent."""
    sets = st.sets(st.integers(0, COUNT - 1))
    counts = st.sets(st.integers(1, COUNT))
    present, at_pool = sorted(data.draw(sets)), sorted(data.draw(counts))
    sources = [filled(layout, sorted(data.draw(sets)), sorted(data.draw(counts)), name) for name in ("host", "store")]
    for source in sources:
        bad = {KEYS[index] for index in data.draw(sets)}
        bad |= {mark(layout, count) for count in data.draw(counts)} if layout.has_snapshots else set()
        source.fail = lambda key, bad=bad: Miss.DIGEST if key in bad else None  # type: ignore[misc]
    what = wanted(layout, present, at_pool)
    outcome, pool = load(layout, sources, what)
    blocks = {KEYS.index(key) for key, kind, _ in pool.adopted if kind is EntryKind.BLOCK} | set(present)
    marks = {mark(layout, count): count * BLOCK for count in range(1, COUNT + 1)} if layout.has_snapshots else {}
    snapshots = {marks[key] for key, kind, _ in pool.adopted if kind is EntryKind.SNAPSHOT} | set(what.snapshots)
    assert outcome.tokens == usable(layout, blocks, snapshots, COUNT)
    assert outcome.tokens >= what.usable_tokens
    for key, kind, payload in pool.adopted:
        if kind is EntryKind.BLOCK:
            assert payload == block(layout, KEYS.index(key))
    readable = set(present) | {
        index
        for index, key in enumerate(KEYS)
        if any(key in source.entries and source.fail(key) is None for source in sources)
    }
    if not layout.has_snapshots:
        lied = {
            index
            for index, key in enumerate(KEYS)
            if any(key in source.entries for source in sources) or index in present
        }
        if lied == readable:
            assert outcome.tokens == usable(layout, readable, set(), COUNT)
