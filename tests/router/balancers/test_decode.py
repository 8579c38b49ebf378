"""router.balancers.decode: KV and requests together, projected to the arrival, and rejections that do not swing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.router.balancers.base import Rejected
from headrace.router.balancers.decode import DecodePolicy, Joint
from headrace.router.cost.curves import DecodeCurve
from headrace.router.cost.decode import DecodeCost
from headrace.router.fleet import Amount, Fleet
from headrace.router.reports import Report
from headrace.router.topology import RankId, Role
from tests.router.balancers.fleets import BLOCK, candidate, decodes, fleet_of, prefills, request


def balancer(fleet: Fleet, **policy: float) -> Joint:
    return Joint(fleet, DecodeCost(), DecodePolicy(**policy))


def names(balance: Joint, fleet: Fleet, arrives: float = 0.0, now: float = 0.0) -> list[str]:
    return [rank.id.replica_id for rank in balance.order(request(), arrives, now)]


def hold(fleet: Fleet, row: int, requests: int, tokens: int, key: str = "x") -> None:
    fleet.begin(fleet.candidates(Role.DECODE)[row].id, key, Amount(tokens, requests=requests), 0.0)


def test_kv_and_requests_both_count() -> None:
    """Spec: KV alone reaches 0.80 of balanced throughput, both together 0.995."""
    fleet = fleet_of(*decodes(3))
    hold(fleet, 0, 100, 10_000)
    hold(fleet, 1, 10, 600_000)
    hold(fleet, 2, 40, 900_000)
    assert names(balancer(fleet), fleet) == ["ddc001", "ddc002", "ddc000"]


def test_the_fullest_rank_of_a_replica_sets_its_pace() -> None:
    """A step takes as long as its slowest rank: a replica with an overfull one is slow on its empty ones, too."""
    ranks = [candidate(f"d{replica}", Role.DECODE, rank=rank) for replica in range(2) for rank in range(2)]
    fleet = fleet_of(*ranks)
    for row, requests in enumerate((200, 0, 100, 100)):
        hold(fleet, row, requests, 100)
    order = [rank.id for rank in balancer(fleet).order(request(), 0.0, 0.0)]
    assert [rank.replica_id for rank in order] == ["d1", "d1", "d0", "d0"]
    assert order[2:] == [RankId("d0", "1", 1), RankId("d0", "1", 0)], "the empty rank slows nobody down"


def test_joint_keeps_both_spreads_small_where_kv_alone_does_not() -> None:
    """A stream of requests with a long tail, ended at random: spread of requests and of KV over 8 ranks."""
    spreads = {}
    for name in ("joint", "kv"):
        chance, fleet = random.Random(5), fleet_of(*decodes(8, rows=10**6, slots=0))
        balance = balancer(fleet)
        live: list[tuple[RankId, str]] = []
        for index in range(3000):
            tokens = int(min(120_000, chance.lognormvariate(8.8, 1.2)))
            kv_alone = fleet.candidates(Role.DECODE)[int(fleet.loads(Role.DECODE, 0.0).tokens.argmin())]
            rank = (kv_alone if name == "kv" else next(balance.order(request(tokens), 0.0, 0.0))).id
            fleet.begin(rank, str(index), Amount(tokens, requests=1), 0.0)
            live.append((rank, str(index)))
            if len(live) > 1600:
                fleet.end(*live.pop(chance.randrange(len(live))))
        loads = fleet.loads(Role.DECODE, 0.0)
        step = DecodeCost().step(loads.requests, loads.tokens)
        spreads[name] = float(step.max() / step.mean())
    assert spreads["joint"] < 1.01
    assert spreads["kv"] > spreads["joint"] + 0.02


def test_running_requests_shrink_until_the_arrival_and_admitted_ones_do_not() -> None:
    fleet = fleet_of(*decodes(2))
    first, second = (rank.id for rank in fleet.candidates(Role.DECODE))
    fleet.report(first, Report(running_requests=60, kv_tokens=60_000), 0.0)
    fleet.report(second, Report(reserved_requests=50, kv_tokens=50_000), 0.0)
    balance = balancer(fleet)
    assert names(balance, fleet, arrives=0.0)[0] == "ddc001"
    assert names(balance, fleet, arrives=30.0)[0] == "ddc000", "its 60 will mostly have ended"
    projection = balance.project(request(), 30.0, 0.0)
    assert projection.requests[0] < 10 < 50 <= projection.requests[1]


def test_a_rank_that_would_be_full_comes_last_and_is_not_left_out() -> None:
    """Its report may be old; it decides itself (L23)."""
    fleet = fleet_of(*decodes(2, rows=100, slots=8))
    hold(fleet, 0, 1, 95 * BLOCK)
    hold(fleet, 1, 7, 10 * BLOCK)
    assert names(balancer(fleet), fleet) == ["ddc001", "ddc000"], "memory"
    hold(fleet, 1, 1, 10 * BLOCK, "y")
    fleet.end(fleet.candidates(Role.DECODE)[0].id, "x")
    assert names(balancer(fleet), fleet) == ["ddc000", "ddc001"], "slots"


def test_rejection_is_by_predicted_load_and_says_when_to_come_back() -> None:
    """L12: what would break the promise to those that run is refused, by the load at its arrival."""
    fleet = fleet_of(*decodes(2))
    balance = balancer(fleet, objective_s=0.030)
    limit = 62  # 25 + 0.08 · n ms
    for row in range(2):
        rank = fleet.candidates(Role.DECODE)[row].id
        fleet.report(rank, Report(running_requests=70, kv_tokens=1000), 0.0)
    with pytest.raises(Rejected) as rejected:
        balance.order(request(), 0.0, 0.0)
    assert 0.05 <= rejected.value.retry_after_s <= 10
    assert len(list(balance.order(request(), 5.0, 0.0))) == 2, "by its arrival enough will have ended"
    for row in range(2):
        rank = fleet.candidates(Role.DECODE)[row].id
        fleet.report(rank, Report(reserved_requests=70, kv_tokens=1000), 1.0)
    with pytest.raises(Rejected):
        balance.order(request(), 6.0, 1.0)
    fleet.report(fleet.candidates(Role.DECODE)[0].id, Report(running_requests=limit - 5), 2.0)
    assert len(list(balance.order(request(), 2.0, 2.0))) == 2


def test_a_request_alone_is_never_rejected() -> None:
    """An objective that even an empty rank misses refuses load, not service."""
    fleet = fleet_of(*decodes(1))
    assert len(list(balancer(fleet, objective_s=0.001).order(request(), 0.0, 0.0))) == 1
    assert list(balancer(fleet_of(*prefills(2)), objective_s=0.001).order(request(), 0.0, 0.0)) == []


def test_admission_by_predicted_load_does_not_swing() -> None:
    """Spec: rejecting by the load of now oscillates. Prefill takes 4 s, answers 10 s, twice the load that fits: running
    requests stay near what the objective allows; by the load of now they overshoot and fall again."""
    swings = {}
    for predicted in (True, False):
        curve = DecodeCurve(10.0, 1.0, 0.0)
        fleet = fleet_of(*decodes(1, rows=10**6, slots=0))
        rank = fleet.candidates(Role.DECODE)[0].id
        balance = Joint(fleet, DecodeCost(curve), DecodePolicy(objective_s=0.050, usual_tokens=250))
        chance, ends, running = random.Random(1), [], []
        waiting: list[float] = []
        for step in range(3000):
            now = step * 0.05
            waiting, arrived = [at for at in waiting if at > now], [at for at in waiting if at <= now]
            ends = [end for end in ends if end > now] + [now + chance.expovariate(1 / 10.0) for _ in arrived]
            known = len(waiting) if predicted else 0
            fleet.report(rank, Report(running_requests=len(ends), reserved_requests=known, step=step), now)
            if chance.random() < 0.4:
                try:
                    balance.order(request(), now + (4.0 if predicted else 0.0), now)
                    waiting.append(now + 4.0)
                except Rejected:
                    pass
            if now > 40:
                running.append(len(ends))
        swings[predicted] = (float(np.std(running)), max(running))
    assert swings[True][1] <= 55, "the objective allows 40"
    assert swings[False][0] > 1.3 * swings[True][0]
    assert swings[False][1] > swings[True][1]


def test_the_usual_answer_follows_what_ended() -> None:
    balance = balancer(fleet_of(*decodes(1)))
    for _ in range(1000):
        balance.finished(1000)
    assert balance.usual_tokens == pytest.approx(1000, rel=0.01)
    balance.finished(10**9)
    assert balance.usual_tokens < 1400
