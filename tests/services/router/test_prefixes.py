"""What the router tells prefill of a prompt's prefix, and what it learns from the answer (L3, L4, L11)."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.router.index.base import HolderTier
from headrace.router.index.snapshot_keys import SnapshotKeys
from headrace.router.ranks import RankNumbers
from headrace.router.request import RoutingRequest, usable_tokens
from headrace.router.topology import RankId
from headrace.services.router.cache_feed import Expectation
from headrace.services.router.prefixes import FRESH_S, Prefixes
from headrace.services.router.settings import IndexSection
from headrace.services.runtime.clock import ManualClock
from headrace.v1 import prefill_pb2

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(8)]
BLOCK = 4
RANKS = [RankId(name, f"life of {name}") for name in "abc"]
REQUEST = RoutingRequest("r", 33, 1, 1, 0, b"", 1e9, blocks=KEYS, usable_tokens=32)


@pytest.fixture
def known() -> Prefixes:
    """Three ranks; nothing is fed."""
    numbers = RankNumbers()
    for rank in RANKS:
        numbers.take(rank)
    made = Prefixes(IndexSection(), numbers, ManualClock(), None)
    made._block_tokens = BLOCK
    return made


def test_names_the_peers_that_have_what_the_rank_lacks(known: Prefixes) -> None:
    """Prefill's loader asks them first: as few peers as cover the prefix, never the rank itself."""
    known.index.stored(0, HolderTier.DEVICE, KEYS[:2])
    known.index.stored(0, HolderTier.HOST, KEYS[5:6])
    known.index.stored(1, HolderTier.HOST, KEYS[:5])
    known.index.stored(2, HolderTier.HOST, KEYS[3:7])
    match = known.local(REQUEST)
    assert (match.device.tolist(), match.shared, match.reach().tolist()) == ([2, 0, 0], 7, [7, 7, 7])
    sources = known.sources(REQUEST, match, RANKS[0])
    assert [(each.peer.incarnation, each.first_block, each.blocks) for each in sources] == [
        ("life of b", 2, 3),
        ("life of c", 5, 2),
    ]
    assert known.sources(REQUEST, match, RankId("d", "unknown")) == ()


def test_a_request_that_need_not_wait_is_matched_once(known: Prefixes) -> None:
    """L14, L22: for its place in the queue and for its ranks; anew when it waited, or when a worker has left."""
    clock = known._clock
    assert isinstance(clock, ManualClock)
    first = known.local(REQUEST)
    assert known.local(REQUEST) is first
    other = RoutingRequest("other", 33, 1, 1, 0, b"", 1e9, blocks=KEYS, usable_tokens=32)
    assert known.local(other) is not first
    second = known.local(REQUEST)
    assert second is not first
    clock.advance(2 * FRESH_S)
    third = known.local(REQUEST)
    assert third is not second
    known.left(SimpleNamespace(replica=SimpleNamespace(incarnation="life of a")))  # type: ignore[arg-type]
    assert known.local(REQUEST) is not third


def test_never_reaches_beyond_what_may_be_used(known: Prefixes) -> None:
    """L4: nothing without replay, N₀ − K with it, all but the last token without a window."""
    known.index.stored(0, HolderTier.DEVICE, KEYS)
    for tokens, blocks in ((0, 0), (3, 0), (4, 1), (31, 7), (32, 8)):
        request = RoutingRequest("r", 33, 1, 1, 0, b"", 1e9, blocks=KEYS, usable_tokens=tokens)
        assert known.local(request).device.tolist() == [blocks, 0, 0]
    assert usable_tokens(1000, 140, 128, True) == 860
    assert usable_tokens(100, 140, 128, True) == 0
    assert usable_tokens(1000, 140, 128, False) == 0
    assert usable_tokens(1000, 0, 0, False) == 999


def test_snapshot_keys_are_made_as_far_as_they_are_asked(known: Prefixes) -> None:
    """L4: a prefix ends at a snapshot; no keys are made for blocks that nobody has."""
    snapshots = SnapshotKeys(KEYS, 22)
    known.index.stored(1, HolderTier.DEVICE, [*KEYS[:5], snapshots[2]])
    snapshots = SnapshotKeys(KEYS, 22)
    request = RoutingRequest("r", 33, 1, 1, 0, b"", 1e9, blocks=KEYS, snapshots=snapshots, usable_tokens=32)
    assert known.local(request).device.tolist() == [0, 3, 0]
    assert len(snapshots._made) == 5
    assert [*snapshots] == [snapshots[number] for number in range(8)]
    assert snapshots[-1] == snapshots[7]
    with pytest.raises(IndexError):
        snapshots[8]


@pytest.mark.parametrize(
    ("cached", "withdrawn", "found", "suspected"),
    [(5, False, "right", []), (6, False, "right", []), (4, True, "evicted", []), (4, False, "wrong", ["life of a"])],
)
def test_a_wrong_hint_corrects_the_index(
    known: Prefixes, cached: int, withdrawn: bool, found: str, suspected: list[str]
) -> None:
    """L3, L24: the worker is asked for everything, unless it has told of a removal that explains it."""
    asked: list[str] = []
    feed: Any = SimpleNamespace(settle=lambda each: None, suspect=asked.append)
    known.feed = feed
    expectation = Expectation("life of a", 5, (KEYS[4],), withdrawn)
    known.used(expectation, prefill_pb2.PrefillReport(cached_tokens=cached * BLOCK))
    assert known.hints == {found: 1}
    assert asked == suspected
    known.used(None, prefill_pb2.PrefillReport())


def test_an_index_without_workers_has_to_be_empty(known: Prefixes) -> None:
    """L11."""
    assert known.problems() == ()
    known.index.stored(0, HolderTier.DEVICE, KEYS)
    assert known.problems() == ("no worker is known, but the prefix index holds 8 entries",)
