"""EPLB against its description, by hand and step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.balancers.experts.eplb import eplb, eplb_layer, pack, replicate
from headrace.router.balancers.experts.placement import PlacementError, balancedness, check_placement, contiguous


def test_worked_example() -> None:
    """README.md, EPLB: four experts, two ranks of three slots."""
    loads = np.array([12.0, 4.0, 5.0, 2.0])
    assert replicate(loads, 6).tolist() == [3, 1, 1, 1]  # 12 → 6 6; 6 6 → 4 4 4
    assert eplb_layer(loads, 2, 2).reshape(2, 3).tolist() == [[2, 0, 3], [0, 0, 1]]


def test_replicas_go_to_the_largest_load_per_replica() -> None:
    assert replicate(np.array([10.0, 9.0, 1.0]), 6).tolist() == [3, 2, 1]


def test_without_traffic_replicas_are_spread() -> None:
    """L20: zero traffic is data: nobody is heavier than anybody."""
    assert replicate(np.zeros(4), 6).tolist() == [2, 2, 1, 1]


def test_packing_takes_the_heaviest_first_into_the_lightest_with_room() -> None:
    assert pack(np.array([1.0, 9.0, 5.0, 4.0]), 2) == [[1, 0], [2, 3]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=4, max_size=12), st.integers(1, 4), st.integers(0, 3))
def test_every_expert_has_a_slot(loads: list[int], ranks: int, spare: int) -> None:
    experts = len(loads)
    replicas = -experts % ranks + spare * ranks
    if (experts + replicas) // ranks > experts:
        return
    placement = eplb(np.array([loads], np.float64), ranks, replicas)
    check_placement(placement, 1, experts, ranks, distinct=False)


def test_a_group_stays_on_one_node() -> None:
    loads = np.random.default_rng(1).integers(1, 100, 16).astype(np.float64)
    placed = eplb_layer(loads, 4, 8, groups=4, nodes=2).reshape(2, -1)
    groups = [{int(expert) // 4 for expert in node} for node in placed]
    assert not groups[0] & groups[1]
    assert groups[0] | groups[1] == {0, 1, 2, 3}


def test_it_balances_the_load_it_was_made_from() -> None:
    tokens = np.array([[[12, 4, 5, 2]]])
    assert balancedness(tokens, contiguous(1, 4, 2), 2) == pytest.approx(11.5 / 16)
    assert balancedness(tokens, eplb(tokens.sum(0).astype(np.float64), 2, 2), 2) == pytest.approx(11.5 / 12)


def test_groups_must_divide() -> None:
    with pytest.raises(PlacementError, match="divide"):
        eplb_layer(np.ones(16), 4, 0, groups=3, nodes=2)
