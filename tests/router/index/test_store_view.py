"""What the router remembers of the store: bounded, ageing, asked for in one call (L12, L24)."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.index.base import StorePrefix
from headrace.router.index.store_view import StoreView

BLOCKS = tuple(hashlib.sha256(b"block" + bytes([number])).digest() for number in range(12))
SNAPSHOTS = tuple(hashlib.sha256(b"snapshot" + bytes([number])).digest() for number in range(12))


def ask(view: StoreView, store: set[bytes], count: int, now: float, *, snapshots: bool, most: int = 100) -> int:
    """One round as the service does it; the number of keys asked."""
    ends = SNAPSHOTS if snapshots else None
    question = view.question(BLOCKS, ends, count, now, most)
    keys = [BLOCKS[position] for position in question.blocks] + [SNAPSHOTS[end - 1] for end in question.snapshots]
    view.answered(BLOCKS, ends, question, [key in store for key in keys], now)
    return len(keys)


@settings(max_examples=100, deadline=None)
@given(
    st.sets(st.sampled_from(BLOCKS + SNAPSHOTS)),
    st.sets(st.sampled_from(BLOCKS + SNAPSHOTS)),
    st.integers(0, 12),
    st.booleans(),
)
def test_one_question_tells_the_prefix(store: set[bytes], told: set[bytes], count: int, snapshots: bool) -> None:
    """L24: after one call the prefix is what the store has, whatever was known before."""
    view = StoreView(100, 60.0, 5.0)
    view.learn(sorted(told), [key in store for key in sorted(told)], 0.0)
    ask(view, store, count, 1.0, snapshots=snapshots)
    leading = next((position for position in range(count) if BLOCKS[position] not in store), count)
    ends = frozenset(end for end in range(1, leading + 1) if snapshots and SNAPSHOTS[end - 1] in store)
    assert view.prefix(BLOCKS, SNAPSHOTS if snapshots else None, count, 1.0) == StorePrefix(leading, ends)
    assert ask(view, store, count, 1.0, snapshots=snapshots) == 0


def test_knowledge_ages() -> None:
    view = StoreView(100, 60.0, 5.0)
    view.learn(BLOCKS[:2], (True, False), 0.0)
    assert view.known(BLOCKS[1], 4.9) is False
    assert view.known(BLOCKS[1], 5.0) is None
    assert view.known(BLOCKS[0], 59.0) is True
    assert view.known(BLOCKS[0], 60.0) is None
    assert len(view) == 0


def test_is_bounded_and_keeps_what_is_used() -> None:
    """L12: the store's content is not mirrored."""
    view = StoreView(4, 60.0, 5.0)
    view.stored(BLOCKS[:4], 0.0)
    assert view.known(BLOCKS[0], 1.0)
    view.stored(BLOCKS[4:6], 1.0)
    assert len(view) == 4
    assert view.known(BLOCKS[0], 1.0)
    assert view.known(BLOCKS[1], 1.0) is None


def test_writers_correct_it() -> None:
    """L24: what a writer says of a key wins over what was known; of unknown keys only their arrival is noted."""
    view = StoreView(100, 60.0, 5.0)
    view.learn(BLOCKS[:2], (False, True), 0.0)
    view.stored(BLOCKS[:1], 1.0)
    view.removed(BLOCKS[1:3], 1.0)
    assert view.known(BLOCKS[0], 1.0) is True
    assert view.known(BLOCKS[1], 1.0) is False
    assert view.known(BLOCKS[2], 1.0) is None
    view.forget()
    assert view.known(BLOCKS[0], 1.0) is None


def test_a_question_is_bounded() -> None:
    """L12: a long prompt asks for the blocks that come first, and for the snapshots behind them."""
    view = StoreView(100, 60.0, 5.0)
    store = {*BLOCKS, *SNAPSHOTS}
    assert ask(view, store, 12, 0.0, snapshots=True, most=8) == 8
    assert view.prefix(BLOCKS, SNAPSHOTS, 12, 0.0).blocks == 8
    assert ask(view, store, 12, 0.0, snapshots=True, most=16) == 16
    assert view.prefix(BLOCKS, SNAPSHOTS, 12, 0.0) == StorePrefix(12, frozenset(range(1, 13)))


@pytest.mark.parametrize("values", [(0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, 0.0)])
def test_refuses_senseless_bounds(values: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        StoreView(*values)
