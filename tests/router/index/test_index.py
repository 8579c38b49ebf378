"""The compact prefix index against its brute-force twin, and what it costs in memory (L4, L24)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvcache.keys import Key
from headrace.router.index.base import HolderTier, PrefixMatch, StorePrefix
from headrace.router.index.index import LEAST_BUDGET, BlockIndex
from headrace.router.index.twin import TwinIndex
from headrace.router.native.build import NativeRouter
from tests.router.native.libraries import LIBRARIES

BUDGET = 1 << 20
BOTH = HolderTier.DEVICE | HolderTier.HOST
in_both = pytest.mark.parametrize("library", LIBRARIES)
"""As Python matches prompts, and as C++ does."""
TIERS = (HolderTier.DEVICE, HolderTier.HOST, BOTH)


def key(name: str) -> Key:
    return hashlib.sha256(name.encode()).digest()


@dataclass(frozen=True)
class Prompt:
    blocks: tuple[Key, ...]
    snapshots: tuple[Key, ...]


def prompt(name: str, blocks: int) -> Prompt:
    return Prompt(
        tuple(key(f"{name} {number}") for number in range(blocks)),
        tuple(key(f"{name} snapshot {number}") for number in range(blocks)),
    )


def same(left: PrefixMatch, right: PrefixMatch) -> None:
    assert left.shared == right.shared
    np.testing.assert_array_equal(left.device, right.device)
    np.testing.assert_array_equal(left.local, right.local)
    np.testing.assert_array_equal(left.reach(), right.reach())


SHORT, LONG = prompt("short", 6), prompt("long", 70)
"""Below and above what the index does in a loop."""
ENTRIES = [*SHORT.blocks, *SHORT.snapshots, *LONG.blocks, *LONG.snapshots]


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, int, HolderTier, Sequence[Key]]:
    kind = draw(st.sampled_from(["stored", "stored", "stored", "removed", "clear", "many"]))
    holder, tier = draw(st.integers(0, 40)), draw(st.sampled_from(TIERS))
    of = draw(st.sampled_from([SHORT, LONG]))
    keys = draw(st.sampled_from([of.blocks, of.snapshots]))
    begin = draw(st.integers(0, len(keys)) | st.just(0))
    return kind, holder, tier, keys[begin : draw(st.integers(begin, len(keys)))]


@in_both
@settings(max_examples=100, deadline=None)
@given(
    st.lists(changes(), max_size=25),
    st.integers(0, 80),
    st.integers(0, 75),
    st.frozensets(st.integers(1, 70), max_size=5),
)
def test_matches_its_twin(
    library: NativeRouter | None,
    steps: list[tuple[str, int, HolderTier, Sequence[Key]]],
    limit: int,
    stored: int,
    ends: frozenset[int],
) -> None:
    """L4, L24: whatever was stored, removed and cleared in whatever order, both say the same of every prompt."""
    index, twin = BlockIndex(BUDGET, library), TwinIndex()
    for kind, holder, tier, keys in steps:
        if kind == "many":
            for each in range(holder):
                index.stored(each, tier, keys)
                twin.stored(each, tier, keys)
        elif kind == "clear":
            assert index.clear(holder, tier) == twin.clear(holder, tier)
        else:
            getattr(index, kind)(holder, tier, keys)
            getattr(twin, kind)(holder, tier, keys)
        assert index.entries == twin.entries
    for each in ENTRIES:
        assert index.holders(each) == twin.holders(each)
    ranks = max(index.ranks, twin.ranks)
    index.ranks = twin.ranks = ranks
    for of in (SHORT, LONG):
        for store in (StorePrefix(), StorePrefix(stored, ends)):
            for snapshots in (None, of.snapshots):
                same(index.match(of.blocks, snapshots, limit, store), twin.match(of.blocks, snapshots, limit, store))


@in_both
def test_says_nothing_of_what_it_does_not_know(library: NativeRouter | None) -> None:
    index = BlockIndex(BUDGET, library)
    index.ranks = 3
    match = index.match(LONG.blocks, LONG.snapshots, 100)
    assert match.shared == 0
    assert match.reach().tolist() == [0, 0, 0]
    assert index.match((), None, 100, StorePrefix(5)).shared == 0


@in_both
def test_reaches_with_own_and_lent_blocks_together(library: NativeRouter | None) -> None:
    """L4: the usable length counts every place that a block can come from: device, a peer's host memory, the store."""
    index = BlockIndex(BUDGET, library)
    index.stored(0, HolderTier.DEVICE, SHORT.blocks[2:4])
    index.stored(1, HolderTier.HOST, SHORT.blocks[4:5])
    match = index.match(SHORT.blocks, None, 6, StorePrefix(2))
    assert (match.shared, match.local.tolist(), match.reach().tolist()) == (2, [0, 0], [5, 2])


@in_both
@pytest.mark.parametrize("layout", ["blocks", "snapshots"])
def test_never_uses_more_than_the_limit(layout: str, library: NativeRouter | None) -> None:
    """L4: bounded replay, or the last token that has to be computed."""
    index = BlockIndex(BUDGET, library)
    index.stored(0, BOTH, SHORT.blocks + SHORT.snapshots)
    match = index.match(
        SHORT.blocks, SHORT.snapshots if layout == "snapshots" else None, 4, StorePrefix(6, frozenset({5, 6}))
    )
    assert (match.device.tolist(), match.shared) == ([4], 4)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30))
def test_events_of_many_keys_are_those_of_few(seed: int) -> None:
    """L24: what goes through columns ends like what goes one by one, dead entries and shared ones included."""
    generator = np.random.default_rng(seed)
    index, twin = BlockIndex(BUDGET), TwinIndex()
    for _ in range(40):
        begin = int(generator.integers(0, 100))
        keys = list(LONG.blocks + LONG.snapshots)[begin : begin + int(generator.integers(1, 90))]
        if generator.random() < 0.1:
            keys += keys[:2]
        generator.shuffle(keys)  # type: ignore[arg-type]
        holder, tier = int(generator.integers(0, 4)), TIERS[int(generator.integers(0, 3))]
        change = "stored" if generator.random() < 0.6 else "removed"
        getattr(index, change)(holder, tier, keys)
        getattr(twin, change)(holder, tier, keys)
        assert index.entries == twin.entries
        for each in (*LONG.blocks, *LONG.snapshots):
            assert index.holders(each) == twin.holders(each)
    assert sum(index.clear(holder) for holder in range(4)) == twin.entries
    assert index.entries == 0


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 6))
def test_stays_inside_its_byte_budget(seed: int, holders: int) -> None:
    """L24: over its budget the index forgets, and what it still says is true."""
    generator = np.random.default_rng(seed)
    index, twin = BlockIndex(LEAST_BUDGET), TwinIndex()
    for round_ in range(60):
        keys = [key(f"{seed} {round_} {number}") for number in range(int(generator.integers(1, 200)))]
        for holder in generator.permutation(8)[:holders].tolist():
            index.stored(holder, HolderTier.DEVICE, keys)
            twin.stored(holder, HolderTier.DEVICE, keys)
            assert index.nbytes <= LEAST_BUDGET
        if generator.random() < 0.2:
            index.removed(0, HolderTier.DEVICE, keys[::2])
            twin.removed(0, HolderTier.DEVICE, keys[::2])
    kept = [each for each in twin.places if index.holders(each)]
    assert kept
    assert all(index.holders(each) == twin.holders(each) for each in kept)
    assert index.entries == sum(len(index.holders(each)) for each in kept)
    assert index.keys == len(kept)


@in_both
def test_forgets_the_longest_unused_first(library: NativeRouter | None) -> None:
    """L24: a prompt that is asked for stays; of a chain the end leaves before the beginning."""
    index = BlockIndex(LEAST_BUDGET, library)
    old, used = prompt("old", 40), prompt("used", 40)
    index.stored(0, HolderTier.DEVICE, used.blocks)
    index.stored(0, HolderTier.DEVICE, old.blocks)
    number = 0
    while index.match(old.blocks, None, 40).device[0] == 40:
        index.match(used.blocks, None, 40)
        # Asking for `old` would be a use of it: look aside.
        while all(index.holders(each) for each in old.blocks):
            index.stored(0, HolderTier.DEVICE, [key(f"new {number}")])
            number += 1
    assert index.forgotten > 0
    assert index.match(used.blocks, None, 40).device[0] == 40
    left = index.match(old.blocks, None, 40).device[0]
    assert 0 < left < 40
    assert not any(index.holders(each) for each in old.blocks[left:])


def test_is_empty_and_small_when_everybody_left() -> None:
    """L11, L14: a replica that is gone leaves nothing behind, and its number can be given to another."""
    index = BlockIndex(8 << 20)
    empty = index.nbytes
    for holder in range(20):
        index.stored(holder, BOTH, [key(f"{holder} {number}") for number in range(300)] + list(LONG.blocks))
    assert index.entries == 20 * 370
    for holder in range(20):
        assert index.clear(holder) == 370
        assert index.held(holder) == 0
    assert (index.entries, index.keys, index.nbytes) == (0, 0, empty)
    index.stored(3, HolderTier.HOST, SHORT.blocks)
    assert index.holders(SHORT.blocks[0]) == {3: HolderTier.HOST}


def test_numbers_of_dead_entries_are_used_again() -> None:
    """L24: churn inside the budget takes no more memory than what is held at once."""
    index = BlockIndex(8 << 20)
    for round_ in range(200):
        index.stored(0, HolderTier.DEVICE, [key(f"{round_} {number}") for number in range(100)])
        if round_ >= 10:
            index.removed(0, HolderTier.DEVICE, [key(f"{round_ - 10} {number}") for number in range(100)])
    assert index.entries == 1000
    assert index.nbytes < 100_000


@pytest.mark.parametrize(
    ("holder", "tier", "keys"),
    [(-1, BOTH, []), (1 << 14, BOTH, []), (0, HolderTier(0), []), (0, BOTH, [b"short"])],
)
def test_refuses_what_is_no_entry(holder: int, tier: HolderTier, keys: list[bytes]) -> None:
    """L10: bad input is refused at the border."""
    with pytest.raises(ValueError, match="must"):
        BlockIndex(BUDGET).stored(holder, tier, keys)


def test_refuses_a_budget_in_which_nothing_fits() -> None:
    with pytest.raises(ValueError, match="at least"):
        BlockIndex(1000)
