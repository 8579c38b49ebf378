"""router.cost.replica_steps: a step of a replica is explained by its fullest rank."""

from __future__ import annotations

import pytest

from headrace.router.cost.decode import DecodeCost
from headrace.router.cost.replica_steps import ReplicaSteps
from headrace.router.topology import RankId

FULL, EMPTY = RankId("d0", "1", 0), RankId("d0", "1", 1)


def step_s(requests: int, kv_tokens: int) -> float:
    """What the engines of this test take."""
    return 0.020 + 0.0004 * requests + 4e-9 * kv_tokens


def test_only_the_fullest_rank_of_a_replica_explains_its_steps() -> None:
    """A rank with one request that waits for one with 200 does not teach that requests cost nothing."""
    cost = DecodeCost()
    steps = ReplicaSteps(cost)
    for step in range(200):
        requests = 50 + 37 * step % 200
        seconds = step_s(requests, 1000 * requests)
        steps.told(EMPTY, 1, 1, 100, seconds, float(step))
        steps.told(FULL, 0, requests, 1000 * requests, seconds, float(step))
    assert float(cost.step(150, 150_000)) == pytest.approx(step_s(150, 150_000), rel=0.1)
    assert float(cost.step(0, 0)) < 0.035


def test_a_rank_that_is_empty_or_gone_hides_nobody() -> None:
    cost = DecodeCost()
    steps = ReplicaSteps(cost)
    for leave in (steps.idle, lambda rank: steps.forget(rank, 0)):
        steps.told(FULL, 0, 200, 900_000, 0.1, 0.0)
        before = cost.fit.theta
        steps.told(EMPTY, 1, 1, 100, 0.2, 1.0)
        assert cost.fit.theta == before, "the other one set the pace"
        leave(FULL)
        steps.told(EMPTY, 1, 1, 100, 0.2, 2.0)
        assert cost.fit.theta != before
        steps.forget(EMPTY, 1)
    steps.told(FULL, 0, 0, 0, 0.1, 3.0)
    steps.told(RankId("d1", "1"), 2, 3, 300, 0.03, 3.0)
    assert cost.fit.theta


def test_a_restarted_replica_is_another_one() -> None:
    """L14: the full rank of a life that is over is no rank of the next."""
    cost = DecodeCost()
    steps = ReplicaSteps(cost)
    steps.told(FULL, 0, 200, 900_000, 0.1, 0.0)
    before = cost.fit.theta
    steps.told(RankId("d0", "2", 1), 5, 1, 100, 0.2, 1.0)
    assert cost.fit.theta != before
