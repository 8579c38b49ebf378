"""The worked example of the experts' README.md, held to its word."""

from __future__ import annotations

import numpy as np

from headrace.router.balancers.experts.costs import Movement
from headrace.router.balancers.experts.eplb import eplb
from headrace.router.balancers.experts.peaks import PeakBalancer
from headrace.router.balancers.experts.placement import contiguous, moves, peaks, rank_loads

TOKENS = np.array([[[8, 8, 0, 2]], [[0, 0, 8, 2]]])
UNREPLICATED = contiguous(1, 4, 2)


def test_what_eplb_makes_of_it() -> None:
    placement = eplb(TOKENS.sum(0).astype(np.float64), ranks=2, replicas=2)
    assert placement.reshape(2, 3).tolist() == [[2, 1, 3], [0, 0, 1]]
    assert rank_loads(TOKENS, placement, 2)[:, 0].tolist() == [[6, 12], [10, 0]]
    assert peaks(TOKENS, placement, 2).tolist() == [22]
    assert moves(UNREPLICATED, placement, 4, 2) == 5


def test_what_the_planner_makes_of_it() -> None:
    plan = PeakBalancer().plan(TOKENS, ranks=2, replicas=2)
    assert plan.placement.reshape(2, 3).tolist() == [[1, 2, 3], [0, 3, 2]]
    assert rank_loads(TOKENS, plan.placement, 2)[:, 0].tolist() == [[9, 9], [5, 5]]
    assert peaks(TOKENS, plan.placement, 2).tolist() == [14]


def test_moves_from_a_placement_without_replicas() -> None:
    plan = PeakBalancer().plan(TOKENS, 2, 2, UNREPLICATED)
    assert plan.placement.reshape(2, 3).tolist() == [[3, 1, 2], [0, 2, 3]]
    assert plan.moves == 3
    short = PeakBalancer(movement=Movement(horizon_steps=1e-3)).plan(TOKENS, 2, 2, UNREPLICATED)
    assert short.moves == 2
