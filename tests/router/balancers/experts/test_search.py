"""Local search against brute force, and its moves against recomputation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.balancers.experts.placement import Bools, Floats, holders
from headrace.router.balancers.experts.search import LayerSearch, Slots


def plain_cost(loads: Floats, slots: Slots, ranks: int, entry: Floats, away: Bools, crossing: float) -> float:
    """Σ peaks + entry + crossing, slot by slot."""
    room = len(slots) // ranks
    copies = [int((slots == expert).sum()) for expert in range(loads.shape[1])]
    cost = 0.0
    for step in loads:
        cost += max(sum(step[e] / copies[e] for e in slots[rank * room : (rank + 1) * room]) for rank in range(ranks))
    for slot, expert in enumerate(slots):
        rank = slot // room
        cost += entry[rank, expert]
        cost += crossing * away[rank, expert] * loads[:, expert].sum() / copies[expert]
    return cost


def best_by_force(loads: Floats, ranks: int, room: int, entry: Floats, away: Bools, crossing: float) -> float:
    """The least cost over all placements without two replicas on a rank."""
    experts = loads.shape[1]
    costs = []
    for sets in itertools.product(itertools.combinations(range(experts), room), repeat=ranks):
        slots = np.array(sets, np.int32).ravel()
        if len(np.unique(slots)) == experts:
            costs.append(plain_cost(loads, slots, ranks, entry, away, crossing))
    return min(costs)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("experts", "ranks", "room"), [(4, 2, 3), (5, 3, 2), (6, 2, 4)])
def test_finds_the_optimum_of_tiny_cases(experts: int, ranks: int, room: int, seed: int) -> None:
    """Every placement is tried by force, with and without costs of moving and crossing."""
    chance = np.random.default_rng(seed)
    loads = chance.integers(0, 40, (3, experts)).astype(np.float64)
    entry = chance.integers(0, 9, (ranks, experts)).astype(np.float64) * (seed % 2)
    away = chance.random((ranks, experts)) < 0.5
    crossing = 0.2 * (seed % 3 == 0)
    slots = np.resize(np.arange(experts, dtype=np.int32), ranks * room)
    for start in (slots, slots[::-1]):
        start = start.copy()
        if holders(start, experts, ranks).sum() == len(start):
            break
    search = LayerSearch(loads, start, ranks, entry, away, crossing)
    found = search.improve(40, np.random.default_rng(seed))
    assert found == pytest.approx(plain_cost(loads, search.slots, ranks, entry, away, crossing), rel=1e-5)
    assert found == pytest.approx(best_by_force(loads, ranks, room, entry, away, crossing), rel=1e-4)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1 << 20), st.integers(2, 4), st.integers(2, 4), st.booleans())
def test_what_is_told_is_what_is_there(seed: int, ranks: int, room: int, costly: bool) -> None:
    """The cost kept up to date by swaps is the recomputed one; no constraint is broken; the start is never better."""
    chance = np.random.default_rng(seed)
    experts = int(chance.integers(room, ranks * room + 1))
    held = [chance.permutation(experts)[:room] for _ in range(ranks)]
    slots = np.concatenate(held).astype(np.int32)
    if len(np.unique(slots)) < experts:
        return
    loads = chance.integers(0, 100, (5, experts)).astype(np.float64)
    entry = chance.integers(0, 50, (ranks, experts)).astype(np.float64) * costly
    away = chance.random((ranks, experts)) < 0.3
    search = LayerSearch(loads, slots, ranks, entry, away, 0.1 * costly)
    assert search.cost == pytest.approx(plain_cost(loads, slots, ranks, entry, away, 0.1 * costly), rel=1e-5)
    before = search.cost
    found = search.improve(3, chance)
    assert found <= before * (1 + 1e-5)
    assert found == pytest.approx(plain_cost(loads, search.slots, ranks, entry, away, 0.1 * costly), rel=1e-4)
    assert holders(search.slots, experts, ranks).sum() == ranks * room
    assert len(np.unique(search.slots)) == experts


def test_without_traffic_nothing_moves() -> None:
    """L20: zero traffic is data, not NaN."""
    slots = np.array([0, 1, 2, 3, 0, 1], np.int32)
    search = LayerSearch(np.zeros((4, 4)), slots, 2, np.zeros((2, 4)), np.zeros((2, 4), np.bool_), 0.0)
    assert search.improve(3, np.random.default_rng(0)) == 0.0
    assert search.slots.tolist() == slots.tolist()
