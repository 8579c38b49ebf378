"""Cursors: the index comes to hold what the source holds, whatever is lost on the way (L14, L24)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.index import cursor as cursor_module
from headrace.router.index.base import HolderTier
from headrace.router.index.changes import Change, Cleared, Numbered, Removed, Stored
from headrace.router.index.cursor import Cursor, HolderHoldings
from headrace.router.index.index import BlockIndex

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(8)]
TIERS = (HolderTier.DEVICE, HolderTier.HOST)
Held = frozenset[tuple[HolderTier, bytes]]


@dataclass
class Holdings:
    """The plain twin of a source's part of the index."""

    held: set[tuple[HolderTier, bytes]] = field(default_factory=set)

    def apply(self, change: Change) -> None:
        match change:
            case Stored(tier, keys):
                self.held |= {(tier, key) for key in keys}
            case Removed(tier, keys):
                self.held -= {(tier, key) for key in keys}
            case Cleared(tier):
                self.held = {each for each in self.held if each[0] != tier}

    def clear(self) -> None:
        self.held.clear()


class Life:
    """One incarnation of a source: its events, and what it held after each."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.events: list[Numbered] = []
        self.states: list[Held] = [frozenset()]

    @property
    def last(self) -> int:
        return len(self.events)

    def say(self, change: Change | None) -> None:
        held = Holdings(set(self.states[-1]))
        if change is not None:
            held.apply(change)
        self.events.append(Numbered(self.last + 1, change))
        self.states.append(frozenset(held.held))

    def pieces(self, watermark: int) -> list[Stored]:
        return [Stored(tier, (key,)) for tier, key in sorted(self.states[watermark])]


change = st.one_of(
    st.builds(Stored, st.sampled_from(TIERS), st.lists(st.sampled_from(KEYS), min_size=1, max_size=3).map(tuple)),
    st.builds(Removed, st.sampled_from(TIERS), st.lists(st.sampled_from(KEYS), min_size=1, max_size=3).map(tuple)),
    st.builds(Cleared, st.sampled_from(TIERS)),
    st.none(),
)


def check(cursor: Cursor, holdings: Holdings, life: Life) -> None:
    """As long as it follows, the index is what the source was at that sequence."""
    if not cursor.lost:
        assert holdings.held == set(life.states[cursor.applied])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_converges_to_its_source(data: st.DataObject) -> None:
    """L14, L24: through loss, repetition, reordering, broken and old snapshots, and restarts."""
    lives = [Life("life 0")]
    holdings = Holdings()
    cursor = Cursor(holdings)
    cursor.restart(lives[0].incarnation)
    for _ in range(data.draw(st.integers(0, 30))):
        life = lives[-1]
        step = data.draw(st.sampled_from(["say", "say", "events", "events", "gap", "snapshot", "broken", "restart"]))
        told = data.draw(st.sampled_from(lives[-2:]))
        if step == "say":
            life.say(data.draw(change))
        elif step == "restart":
            lives.append(Life(f"life {len(lives)}"))
            cursor.restart(lives[-1].incarnation)
            assert not holdings.held
        elif step in ("events", "gap"):
            begin = data.draw(st.integers(0, told.last))
            end = data.draw(st.integers(begin, told.last))
            cursor.take(told.incarnation, told.events[begin:end], gap=step == "gap")
        else:
            watermark = data.draw(st.integers(0, told.last))
            pieces = told.pieces(watermark)
            if cursor.begin_snapshot(told.incarnation, watermark):
                sent = len(pieces) if step == "snapshot" else data.draw(st.integers(0, len(pieces)))
                for piece in pieces[:sent]:
                    assert cursor.snapshot_piece(told.incarnation, [piece])
                if step == "snapshot":
                    cursor.end_snapshot(told.incarnation)
                else:
                    cursor.abandon_snapshot()
        check(cursor, holdings, lives[-1])
    life = lives[-1]
    cursor.take(life.incarnation, life.events[cursor.applied :])
    if cursor.lost:
        assert cursor.begin_snapshot(life.incarnation, life.last)
        cursor.snapshot_piece(life.incarnation, life.pieces(life.last))
        assert cursor.end_snapshot(life.incarnation)
    assert cursor.applied == life.last
    assert holdings.held == set(life.states[-1])


def follower() -> tuple[Cursor, Holdings]:
    holdings = Holdings()
    cursor = Cursor(holdings)
    cursor.restart("a")
    return cursor, holdings


def stored(sequence: int, number: int) -> Numbered:
    return Numbered(sequence, Stored(HolderTier.DEVICE, (KEYS[number],)))


def test_events_behind_the_watermark_that_came_early_are_applied() -> None:
    """L24: the watermark is real: what came while the snapshot was sent is neither lost nor applied twice."""
    cursor, holdings = follower()
    cursor.take("a", [stored(5, 1)], gap=True)
    assert (cursor.lost, holdings.held) == (True, set())
    assert cursor.begin_snapshot("a", 5)
    cursor.take("a", [stored(6, 2)])
    cursor.snapshot_piece("a", [Stored(HolderTier.DEVICE, (KEYS[0], KEYS[1]))])
    assert cursor.end_snapshot("a")
    assert cursor.next_sequence == 7
    assert holdings.held == {(HolderTier.DEVICE, key) for key in KEYS[:3]}
    assert (cursor.counts.gaps, cursor.counts.snapshots, cursor.counts.repeated) == (1, 1, 1)


def test_too_many_waiting_events_cost_another_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """L12: nothing waits without bound."""
    monkeypatch.setattr(cursor_module, "MOST_WAITING_KEYS", 2)
    cursor, _ = follower()
    cursor.take("a", [stored(number, 0) for number in range(2, 8)])
    assert cursor.begin_snapshot("a", 1)
    assert not cursor.end_snapshot("a")
    assert cursor.lost
    assert cursor.begin_snapshot("a", 7)
    assert cursor.end_snapshot("a")


def test_a_former_life_is_dropped() -> None:
    """L14: a restarted worker is another one; late words of the first change nothing."""
    cursor, holdings = follower()
    cursor.take("a", [stored(1, 0)])
    cursor.restart("b")
    assert not holdings.held
    cursor.take("a", [stored(2, 1)])
    assert not cursor.begin_snapshot("a", 9)
    assert not holdings.held
    assert cursor.counts.foreign == 1
    cursor.take("b", [stored(1, 3)])
    cursor.restart("")
    cursor.take("b", [stored(2, 1)])
    assert not holdings.held


def test_a_suspected_source_is_asked_for_everything() -> None:
    """L24: an index that proved wrong is corrected by a snapshot."""
    cursor, holdings = follower()
    cursor.take("a", [stored(1, 0)])
    cursor.suspect()
    assert cursor.lost
    assert cursor.begin_snapshot("a", 1)
    assert cursor.end_snapshot("a")
    assert not holdings.held


def test_holders_share_a_process() -> None:
    index = BlockIndex(1 << 20)
    holdings = HolderHoldings(index, (2, 5))
    holdings.apply(Stored(HolderTier.DEVICE, tuple(KEYS)))
    holdings.apply(Removed(HolderTier.DEVICE, (KEYS[0],)))
    assert index.holders(KEYS[0]) == {}
    assert index.holders(KEYS[1]) == {2: HolderTier.DEVICE, 5: HolderTier.DEVICE}
    holdings.apply(Cleared(HolderTier.HOST))
    assert index.entries == 14
    holdings.clear()
    assert index.entries == 0
