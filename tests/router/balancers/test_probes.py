"""router.balancers.probes: a slow rank is tried, rarely, and comes back when it has recovered."""

from __future__ import annotations

import numpy as np

from headrace.router.balancers.decode import Joint
from headrace.router.balancers.probes import EVERY_REQUESTS, EVERY_S, Probes
from headrace.router.cost.curves import DecodeCurve
from headrace.router.cost.decode import DecodeCost
from headrace.router.fleet import Amount, Fleet
from headrace.router.topology import Candidate, Role
from tests.router.balancers.fleets import decodes, fleet_of, request

ANSWER_STEPS = 20


class World:
    """Requests one after another, which their rank answers step by step before the next comes."""

    def __init__(self, ranks: int) -> None:
        self.fleet: Fleet = fleet_of(*decodes(ranks))
        self.cost = DecodeCost(DecodeCurve(20.0, 0.1, 0.0))
        self.balance = Joint(self.fleet, self.cost)
        self.slow: dict[str, float] = {}
        self.now = 0.0
        self._count = 0

    def ask(self, pause_s: float = 0.0) -> str:
        """One request; the replica it went to."""
        rank = next(self.balance.order(request(affinity=self._count.to_bytes(4, "little")), self.now, self.now))
        self._count += 1
        name = rank.id.replica_id
        number = self.fleet.numbers.take(rank.id)
        for _ in range(ANSWER_STEPS):
            seconds = 0.0201 * self.slow.get(name, 1.0)
            self.now += seconds
            self.cost.observe(number, 1, 1000, seconds, self.now)
        self.now += pause_s
        return name

    def slowness(self, name: str) -> float:
        ranks: list[str] = [rank.id.replica_id for rank in self.fleet.candidates(Role.DECODE)]
        return float(self.cost.slowness(self.fleet.columns(Role.DECODE).numbers, self.now)[ranks.index(name)])


def test_a_slow_rank_gets_a_trickle_and_returns_when_it_has_recovered() -> None:
    """L14, Show 6: nothing at all would leave it unseen for ever; its share would harm those who get it."""
    world = World(4)
    for _ in range(40):
        world.ask()
    world.slow["ddc001"] = 5.0
    names = [world.ask() for _ in range(600)]
    share = names[100:].count("ddc001") / 500
    assert 0 < share <= 1 / EVERY_REQUESTS + 0.01
    assert world.slowness("ddc001") > 2.0, "the trickle keeps it known as slow"
    world.slow.clear()
    names = [world.ask() for _ in range(400)]
    assert names[-200:].count("ddc001") > 25, "a quarter would be fair"


def test_probes_are_bounded_by_time_and_by_what_runs_there() -> None:
    """A quiet cluster does not send every request to its slow rank, nor a second one before the first has ended."""
    fleet = fleet_of(*decodes(3))
    cost = DecodeCost(DecodeCurve(20.0, 0.1, 0.0))
    for step in range(200):
        for number in range(3):
            cost.observe(number, 1, 1000, 0.0201 * (1 + 4 * (number == 2)), 0.001 * step)
    balance = Joint(fleet, cost)
    slow = fleet.candidates(Role.DECODE)[2]

    def first(now: float) -> Candidate:
        return next(balance.order(request(), now, now))

    assert first(1.0) == slow
    assert all(first(1.0 + 0.001 * index) != slow for index in range(10 * EVERY_REQUESTS)), "not twice within 5 s"
    later = 1.1 + EVERY_S
    fleet.begin(slow.id, "probe", Amount(tokens=1000, requests=1), later)
    assert all(first(later) != slow for _ in range(2 * EVERY_REQUESTS)), "one at a time"
    fleet.end(slow.id, "probe")
    projection = balance.project(request(), later, later)
    assert projection.probe is None, "looking is not sending"
    assert first(later) == slow
    assert all(first(later + 100.0) != slow for _ in range(EVERY_REQUESTS)), "one request of so many"


def test_a_newcomer_with_the_number_of_one_that_was_tried_is_tried_at_once() -> None:
    """L14: when the other was tried says nothing of it."""
    numbers, slowness, own = np.array([0, 1]), np.array([1.0, 5.0]), np.array([0, 0])
    probes = Probes()
    assert probes.take(numbers, slowness, own, 0.0) == 1
    assert probes.take(numbers, slowness, own, 1.0) is None
    probes.clear(1)
    assert probes.take(numbers, slowness, own, 1.0) == 1


def test_no_probe_where_nobody_is_slow() -> None:
    world = World(3)
    for _ in range(3 * EVERY_REQUESTS):
        world.ask()
        assert world.balance.probe(world.now) is None
