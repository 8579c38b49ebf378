"""Epochs under every order of events that hypothesis finds: all ranks switch at one boundary, or none does."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.balancers.experts.epochs import (
    Begun,
    Cleared,
    Epoch,
    EpochError,
    Event,
    Failed,
    Loaded,
    Lost,
    Phase,
    RankEpoch,
    Switched,
    Tick,
    advance,
    replay,
)

DEADLINE = 10.0


class FakeReplica:
    """Ranks that step together, and a coordinator whose orders and answers are late, lost and repeated at will."""

    def __init__(self, ranks: int, bad: int | None) -> None:
        self.record: list[Event] = [Begun(DEADLINE)]
        self.begin = Epoch(1, ranks)
        self.epoch = replay(self.begin, self.record)
        self.ranks = [RankEpoch() for _ in range(ranks)]
        self.bad = bad
        """A rank whose weights never arrive."""
        self.steps = [0] * ranks
        self.offers: dict[int, dict[int, int]] = defaultdict(dict)
        self.maps: dict[int, set[int]] = defaultdict(set)
        """Step → maps that ranks ran it with."""
        self.switched: dict[int, int] = {}

    def tell(self, event: Event) -> None:
        self.record.append(event)
        self.epoch = advance(self.epoch, event)

    def order(self, rank: int) -> None:
        """The coordinator's current order reaches a rank."""
        state = self.ranks[rank]
        if self.epoch.phase is Phase.LOADING:
            self.ranks[rank] = state.load(1)
        elif self.epoch.phase is Phase.ABORTING:
            self.ranks[rank] = state.abort(1)

    def late_order(self, rank: int) -> None:
        """An order to load that was under way for long."""
        self.ranks[rank] = self.ranks[rank].load(1)

    def work(self, rank: int) -> None:
        """Its weights land."""
        if rank != self.bad:
            self.ranks[rank] = self.ranks[rank].loaded(1)

    def answer(self, rank: int) -> None:
        """What a rank has to say reaches the coordinator."""
        state = self.ranks[rank]
        if state.active == 1:
            self.tell(Switched(1, rank, self.switched[rank]))
            if state.spare:
                self.tell(Cleared(1, rank))
        elif state.ready == 1:
            self.tell(Loaded(1, rank))
        elif state.withdrawn == 1 and state.spare:
            self.tell(Cleared(1, rank))

    def step(self, rank: int) -> None:
        """The next half of a step boundary, if the others let it: offer, or cross and run the step."""
        number, state = self.steps[rank], self.ranks[rank]
        if not state.offered:
            self.ranks[rank], self.offers[number][rank] = state.offer()
        elif len(self.offers[number]) == len(self.ranks):
            crossed = state.cross(min(self.offers[number].values()))
            if crossed.active > state.active:
                self.switched[rank] = number
            self.maps[number].add(crossed.active)
            # Freed after the step that switched: at the next boundary at the earliest.
            self.ranks[rank] = crossed.free() if state.retiring is not None else crossed
            self.steps[rank] += 1

    def settle(self) -> None:
        """Everything arrives in the end."""
        for round_ in range(8):
            if round_ == 2:
                self.tell(Tick(DEADLINE + 1))
            for turn in (self.order, self.work, self.answer, self.step, self.step, self.answer):
                for rank in range(len(self.ranks)):
                    turn(rank)


actions = st.lists(
    st.tuples(
        st.sampled_from(["order", "late_order", "work", "answer", "step", "step", "fail", "tick"]), st.integers(0, 3)
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.one_of(st.none(), st.integers(0, 3)), actions)
def test_all_ranks_switch_at_one_boundary_or_none(ranks: int, bad: int | None, script: list[tuple[str, int]]) -> None:
    """L20: one recorded plan; a rank that misses the epoch aborts it for all, and no slot stays behind."""
    replica = FakeReplica(ranks, None if bad is None else bad % ranks)
    for action, number in script:
        rank = number % ranks
        if action == "fail":
            replica.tell(Failed(1, rank, "checksum"))
        elif action == "tick":
            replica.tell(Tick(DEADLINE + number - 2))
        else:
            getattr(replica, action)(rank)
        # A coordinator that died and read its record goes on in the same state.
        assert replay(replica.begin, replica.record) == replica.epoch
        assert all(len(maps) == 1 for maps in replica.maps.values())
    replica.settle()
    assert all(len(maps) == 1 for maps in replica.maps.values())
    assert all(rank.spare for rank in replica.ranks)
    served = {rank.active for rank in replica.ranks}
    assert (replica.epoch.phase, served) in [(Phase.DONE, {1}), (Phase.ABORTED, {0})]
    assert replica.bad is None or served == {0}
    assert replica.epoch.unanswered == ()


def test_a_good_epoch() -> None:
    replica = FakeReplica(2, None)
    for turn in (replica.order, replica.work, replica.answer):
        turn(0)
    for rank in (0, 1, 0, 1):
        replica.step(rank)
    assert replica.maps == {0: {0}}, "rank 1 has not loaded"
    for turn in (replica.order, replica.work):
        turn(1)
    for rank in (0, 1, 1, 0):
        replica.step(rank)
    assert replica.maps[1] == {1}
    assert replica.ranks[0].retiring == 0, "the step that switched may still run"
    with pytest.raises(EpochError, match="spare slots, which epoch 0 has"):
        replica.ranks[0].load(2)
    replica.settle()
    assert replica.epoch.phase is Phase.DONE
    assert replica.epoch.switched_at == 1
    assert replica.ranks[0].load(2).loading == 2


def test_an_abort_between_offer_and_result_waits_for_the_result() -> None:
    """A rank is bound by what it told the others: they may already run with the new map."""
    offered, _ = RankEpoch().load(1).loaded(1).offer()
    bound = offered.abort(1)
    assert bound.ready == 1
    assert bound.cross(1).active == 1
    assert bound.cross(0).spare


def test_an_abort_that_comes_after_the_switch_is_too_late() -> None:
    epoch = replay(Epoch(1, 2), [Begun(DEADLINE), Loaded(1, 0), Loaded(1, 1), Tick(DEADLINE + 1)])
    assert epoch.phase is Phase.ABORTING
    epoch = replay(epoch, [Switched(1, 1, 7), Cleared(1, 1), Switched(1, 0, 7), Cleared(1, 0)])
    assert epoch.phase is Phase.DONE
    assert epoch.reason == ""
    assert RankEpoch(active=1).abort(1) == RankEpoch(active=1)


def test_a_late_order_to_load_is_not_followed() -> None:
    assert RankEpoch().abort(1).load(1).spare
    assert RankEpoch(active=3).load(2).spare


def test_a_lost_rank_ends_the_epoch() -> None:
    epoch = replay(Epoch(1, 2), [Begun(DEADLINE), Loaded(1, 0), Lost(1)])
    assert epoch.phase is Phase.ABORTED
    assert "rank 1 is gone" in epoch.reason


def test_late_ranks_are_named() -> None:
    epoch = replay(Epoch(1, 3), [Begun(DEADLINE), Loaded(1, 1), Tick(DEADLINE + 0.1)])
    assert epoch.phase is Phase.ABORTING
    assert epoch.reason.endswith("ranks not ready: 0, 2")
    assert epoch.unanswered == (0, 1, 2)


def test_events_of_other_epochs_change_nothing() -> None:
    epoch = replay(Epoch(4, 2), [Begun(DEADLINE)])
    assert replay(epoch, [Loaded(3, 0), Failed(3, 0, "late"), Switched(5, 1, 9), Cleared(3, 1)]) == epoch


@pytest.mark.parametrize(
    "events",
    [
        [Begun(1.0), Begun(1.0)],
        [Begun(1.0), Loaded(1, 2)],
        [Begun(1.0), Cleared(1, 0)],
        [Switched(1, 0, 5)],
        [Begun(1.0), Switched(1, 0, 5), Switched(1, 1, 6)],
    ],
)
def test_what_cannot_be_is_refused(events: list[Event]) -> None:
    with pytest.raises(EpochError):
        replay(Epoch(1, 2), events)


def test_a_result_that_nobody_offered_is_refused() -> None:
    state, offer = RankEpoch().offer()
    assert offer == 0
    with pytest.raises(EpochError, match="cannot be the least"):
        state.cross(1)
    with pytest.raises(EpochError):
        RankEpoch().cross(0)
