"""The expert balancer on routing of our own: better than EPLB on what it has not seen, and moves that pay."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from headrace.router.balancers.base import ExpertBalancer, Tokens
from headrace.router.balancers.experts.costs import Movement, Nodes
from headrace.router.balancers.experts.eplb import eplb
from headrace.router.balancers.experts.peaks import PeakBalancer, Sampling
from headrace.router.balancers.experts.placement import (
    PlacementError,
    balancedness,
    check_placement,
    contiguous,
    holders,
    moves,
    peaks,
)
from tests.router.balancers.experts.routing import counted, routing

LAYERS, EXPERTS, RANKS = 3, 32, 8
SLIDING = Sampling(window=4, resampled=24)


@cache
def halves() -> tuple[Tokens, Tokens]:
    """Quarter steps of the first half, steps of the second."""
    ids = routing(4096, LAYERS, EXPERTS)
    return counted(ids[:, :2048], 32, EXPERTS), counted(ids[:, 2048:], 128, EXPERTS)


def test_beats_eplb_on_the_unseen_half() -> None:
    seen, unseen = halves()
    current = contiguous(LAYERS, EXPERTS, RANKS)
    balancer: ExpertBalancer = PeakBalancer(sampling=SLIDING)
    plan = balancer.plan(seen, RANKS, RANKS, current)
    peer = eplb(seen.sum(0).astype(np.float64), RANKS, RANKS)
    ours, theirs = (balancedness(unseen, placement, RANKS) for placement in (plan.placement, peer))
    assert ours > theirs + 0.01
    assert theirs > balancedness(unseen, current, RANKS)
    assert plan.moves == moves(current, plan.placement, EXPERTS, RANKS) <= moves(current, peer, EXPERTS, RANKS)
    assert plan.peak_after < plan.peak_before


def test_a_second_plan_of_the_same_tokens_moves_nothing() -> None:
    seen, _ = halves()
    balancer = PeakBalancer(sampling=SLIDING, shakes=0)
    first = balancer.plan(seen, RANKS, RANKS)
    again = balancer.plan(seen, RANKS, RANKS, first.placement)
    assert again.moves == 0
    assert again.peak_after == again.peak_before


def test_the_same_seed_plans_the_same() -> None:
    seen, _ = halves()
    plans = [PeakBalancer(sampling=SLIDING, seed=3).plan(seen, RANKS, RANKS).placement for _ in range(2)]
    assert np.array_equal(*plans)


def test_a_shorter_horizon_moves_less_until_nothing_pays() -> None:
    seen, _ = halves()
    current = eplb(np.ones((LAYERS, EXPERTS)), RANKS, RANKS)
    counts = [
        PeakBalancer(movement=Movement(horizon_steps=steps), sampling=SLIDING, shakes=0)
        .plan(seen, RANKS, RANKS, current)
        .moves
        for steps in (1e9, 300, 1e-3)
    ]
    assert counts[0] > counts[1] > counts[2] == 0


def test_new_slots_are_filled_even_where_nothing_pays() -> None:
    """From no replicas to one slot more on each rank: that many moves are needed, and no more are made."""
    seen, _ = halves()
    current = contiguous(LAYERS, EXPERTS, RANKS)
    plan = PeakBalancer(movement=Movement(horizon_steps=1e-3)).plan(seen, RANKS, RANKS, current)
    assert plan.moves == LAYERS * RANKS


def test_fewer_slots_than_now() -> None:
    seen, _ = halves()
    wide = PeakBalancer(sampling=SLIDING, shakes=0).plan(seen, RANKS, 2 * RANKS).placement
    plan = PeakBalancer(sampling=SLIDING, shakes=0).plan(seen, RANKS, RANKS, wide)
    check_placement(plan.placement, LAYERS, EXPERTS, RANKS)


def test_experts_come_from_their_own_node_where_that_is_as_good() -> None:
    """Traffic inside a node is cheap: with dear links more of what moves comes from the own node."""
    seen, _ = halves()
    current = eplb(np.ones((LAYERS, EXPERTS)), RANKS, RANKS)
    across = []
    for speed in (50e9, 20e6):
        movement = Movement(inside_bytes_per_s=50e9, across_bytes_per_s=speed, horizon_steps=50_000)
        plan = PeakBalancer(Nodes(nodes=2), movement, SLIDING, shakes=0).plan(seen, RANKS, RANKS, current)
        count = 0
        for old, came in zip(current, plan.arriving, strict=True):
            on_node = holders(old, EXPERTS, RANKS).reshape(2, -1, EXPERTS).any(1).repeat(RANKS // 2, 0)
            count += int((came & ~on_node).sum())
        across.append(count)
    assert across[1] < across[0]


def test_groups_keep_to_their_node() -> None:
    """A token that is limited to few groups crosses to few nodes, as long as a group's experts share one."""
    seen, _ = halves()

    def off_home(crossing: float) -> float:
        nodes = Nodes(nodes=2, groups=4, crossing=crossing)
        plan = PeakBalancer(nodes, sampling=SLIDING, shakes=0).plan(seen, RANKS, RANKS)
        off = 0
        for slots in plan.placement:
            held = holders(slots, EXPERTS, RANKS).reshape(2, RANKS // 2, 4, EXPERTS // 4).sum((1, 3))
            off += int(held.min(0).sum())
        return off

    assert off_home(5.0) == 0 < off_home(0.0)


def test_without_traffic_the_placement_stays() -> None:
    """L20: zero traffic is data, not NaN: in one layer, or in all."""
    current = eplb(np.ones((LAYERS, EXPERTS)), RANKS, RANKS)
    silent = np.zeros((5, LAYERS, EXPERTS), np.int64)
    plan = PeakBalancer(sampling=SLIDING).plan(silent, RANKS, RANKS, current)
    assert plan.moves == 0
    assert plan.peak_before == plan.peak_after == 0
    check_placement(PeakBalancer().plan(silent, RANKS, RANKS).placement, LAYERS, EXPERTS, RANKS)
    seen, _ = halves()
    partly = seen.copy()
    partly[:, 1] = 0
    plan = PeakBalancer(sampling=SLIDING, shakes=0).plan(partly, RANKS, RANKS, current)
    assert not plan.arriving[1].any()
    assert plan.arriving[0].any()


def test_never_worse_than_eplb_on_its_own_tokens() -> None:
    seen, _ = halves()
    plan = PeakBalancer(shakes=0).plan(seen, RANKS, RANKS)
    peer = eplb(seen.sum(0).astype(np.float64), RANKS, RANKS)
    assert (peaks(seen, plan.placement, RANKS) <= peaks(seen, peer, RANKS) * (1 + 1e-5)).all()


def test_windows_slide_over_intervals_and_draws_keep_the_mean() -> None:
    tokens = np.arange(10).reshape(5, 1, 2)
    steps = Sampling(window=2).steps(tokens, np.random.default_rng(0))
    assert steps[:, 0].tolist() == [[2, 4], [6, 8], [10, 12], [14, 16]]
    drawn = Sampling(window=2, resampled=2000).steps(tokens, np.random.default_rng(0))[4:]
    assert drawn.mean(0)[0] == pytest.approx(2 * tokens.mean(0)[0], rel=0.05)
    assert len(Sampling(window=9).steps(tokens, np.random.default_rng(0))) == 1


@pytest.mark.parametrize("replicas", [3, 8 * 32])
def test_impossible_sizes_are_refused(replicas: int) -> None:
    with pytest.raises(PlacementError):
        PeakBalancer().plan(halves()[0], RANKS, replicas)


def test_a_current_placement_must_hold_every_expert() -> None:
    with pytest.raises(PlacementError, match="no slot"):
        PeakBalancer().plan(halves()[0], RANKS, RANKS, np.zeros((LAYERS, EXPERTS), np.int32))
