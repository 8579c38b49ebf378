"""Placements: what they hold, what they make of a load, what is moved between two."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.balancers.base import Placement, Tokens
from headrace.router.balancers.experts.placement import (
    PlacementError,
    arriving,
    balancedness,
    check_placement,
    check_tokens,
    contiguous,
    moves,
    peaks,
    rank_loads,
    slots_per_rank,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tokens, Placement, int]:
    """Small tokens, and a placement in which every expert has a slot."""
    steps, layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    ranks = draw(st.integers(1, 4))
    room = -(-experts // ranks) + draw(st.integers(0, 2))
    chance = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    tokens = chance.integers(0, 20, (steps, layers, experts))
    placement = np.empty((layers, ranks * room), np.int32)
    for layer in range(layers):
        more = chance.integers(0, experts, ranks * room - experts)
        placement[layer] = chance.permutation(np.concatenate([np.arange(experts), more]))
    return tokens, placement, ranks


@given(cases())
def test_loads_against_a_plain_twin(case: tuple[Tokens, Placement, int]) -> None:
    tokens, placement, ranks = case
    room = placement.shape[1] // ranks
    loads, ratios, tops = rank_loads(tokens, placement, ranks), [], [Fraction(0)] * len(placement)
    for step in range(len(tokens)):
        for layer, slots in enumerate(placement.tolist()):
            by_rank = [
                sum(
                    Fraction(int(tokens[step, layer, e]), slots.count(e))
                    for e in slots[rank * room : (rank + 1) * room]
                )
                for rank in range(ranks)
            ]
            assert loads[step, layer] == pytest.approx([float(load) for load in by_rank])
            largest = max(by_rank)
            tops[layer] += largest
            ratios.append(sum(by_rank) / ranks / largest if largest else Fraction(1))
    assert balancedness(tokens, placement, ranks) == pytest.approx(float(sum(ratios) / len(ratios)))
    assert peaks(tokens, placement, ranks) == pytest.approx([float(top) for top in tops])


def test_a_step_without_tokens_is_balanced() -> None:
    """L20: zero traffic is data, not NaN."""
    placement = contiguous(2, 4, 2)
    assert balancedness(np.zeros((3, 2, 4), np.int64), placement, 2) == 1.0


def test_moves_are_slots_whose_expert_is_new_on_the_rank() -> None:
    old = contiguous(1, 4, 2)  # 0 1 | 2 3
    new = np.array([[1, 0, 2, 3, 1, 2]], np.int32)  # 1 0 2 | 3 1 2: expert 2 came to rank 0, expert 1 to rank 1
    assert moves(old, new, 4, 2) == 2
    assert [tuple(place) for place in np.argwhere(arriving(old, new, 4, 2)[0])] == [(0, 2), (1, 1)]
    assert moves(old, old, 4, 2) == 0


def test_a_second_slot_of_an_expert_on_its_rank_is_a_move() -> None:
    new = np.array([[0, 1, 1, 2, 3, 0]], np.int32)  # 0 1 1 | 2 3 0
    assert moves(contiguous(1, 4, 2), new, 4, 2) == 2


@pytest.mark.parametrize(
    ("experts", "ranks", "replicas", "says"),
    [(64, 8, 3, "use 0 replicas"), (5, 4, 1, "use 3 replicas"), (4, 2, 6, "twice"), (4, 0, 0, "at least")],
)
def test_sizes_that_do_not_fit_are_refused(experts: int, ranks: int, replicas: int, says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        slots_per_rank(experts, ranks, replicas)


def test_slots_per_rank() -> None:
    assert slots_per_rank(64, 8, 8) == 9


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ([[0, 1, 2, 4]], "outside"),
        ([[0, 1, 2, 2]], "no slot"),
        ([[0, 0, 1, 2, 3, 1]], "twice"),
        ([[0, 1, 2]], "multiple of 2"),
        ([[0, 1, 2, 3]] * 2, "shape"),
    ],
)
def test_bad_placements_are_refused(placement: list[list[int]], says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        check_placement(np.array(placement, np.int32), 1, 4, 2)


@pytest.mark.parametrize(
    "tokens", [np.zeros((2, 4), np.int64), np.zeros((0, 1, 4), np.int64), np.full((1, 1, 4), -1), np.zeros((1, 1, 4))]
)
def test_bad_tokens_are_refused(tokens: Tokens) -> None:
    with pytest.raises(PlacementError):
        check_tokens(tokens)
