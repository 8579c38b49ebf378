"""Every tolerance form accepts what it should and refuses the nearest thing it should not."""

from __future__ import annotations

import math

import pytest
import torch

from bench.golden_harness import tolerance as forms
from bench.golden_harness.case import GoldenFormatError, Tolerance

T = torch.tensor


@pytest.mark.parametrize(
    ("tolerance", "good", "bad", "ref"),
    [
        ("exact", T([0.0, 2.0]), T([0.0, 2.0000002]), T([-0.0, 2.0])),
        ("exact", T([1, 2]), T([1, 3]), T([1, 2], dtype=torch.int32)),
        ("exact", T([-math.inf]), T([-1e29]), T([-1e30])),
        ("exact", T([1.0]), T([math.nan]), T([1.0])),
        ({"atol": 0.1, "rtol": 0.0}, T([1.09, 2.0]), T([1.11, 2.0]), T([1.0, 2.0])),
        ({"atol": 0.0, "rtol": 0.1}, T([1.0, 22.0]), T([1.11, 20.0]), T([1.0, 20.0])),
        ({"atol": 0.1, "rtol": 0.1}, T([1.0, -math.inf]), T([1.0, math.nan]), T([1.0, -1e30])),
        ({"atol": 9.0, "rtol": 9.0}, T([math.inf]), T([3.0]), T([math.inf])),
        ({"atol": 0.0, "rtol": 0.0, "max_mismatch_frac": 0.5}, T([1.0, 9.0]), T([8.0, 9.0]), T([1.0, 2.0])),
        (
            {"atol": 0.0, "rtol": 0.0, "max_mismatch_frac": 0.5, "mismatch_atol": 1.0},
            T([1.0, 3.0]),
            T([1.0, 3.1]),
            T([1.0, 2.0]),
        ),
        ({"rel_l2": 0.1, "max_abs": 0.5}, T([3.0, 4.4]), T([3.0, 4.6]), T([3.0, 4.0])),
        ({"rel_l2": 0.1, "max_abs": 9.0}, T([3.0, 4.4]), T([3.0, 4.6]), T([3.0, 4.0])),
        ({"rel_l2": 0.1, "max_abs": 9.0}, T([3.0, 4.0]), T([3.0, math.nan]), T([3.0, 4.0])),
        ("bytes(max_mismatch_frac=5e-1)", T([1, 9]), T([8, 9]), T([1, 2])),
        ({"mismatch_frac_max": 0.5}, T([1, 9]), T([8, 9]), T([1, 2])),
        ("row_set", T([[3, 1, -1], [-1, 5, -1]]), T([[3, 1, 1], [5, -1, -1]]), T([[-1, 1, 3], [5, -1, -1]])),
        ("must_differ", T([1.0, 2.1]), T([1.0, 2.0005]), T([1.0, 2.0])),
        ("must_differ", T([1.0, 2.1]), T([math.nan, 9.0]), T([1.0, 2.0])),
    ],
)
def test_forms(tolerance: Tolerance, good: torch.Tensor, bad: torch.Tensor, ref: torch.Tensor) -> None:
    if isinstance(tolerance, str) and tolerance.startswith("bytes"):
        good, bad, ref = (t.to(torch.uint8) for t in (good, bad, ref))
    assert forms.check(tolerance, good, ref) is None
    assert forms.check(tolerance, bad, ref) is not None
    assert forms.check(tolerance, torch.cat((good, good)), ref) is not None


def test_rows_are_layer_and_token() -> None:
    """Median and 90th percentile over (layer, token), not over elements."""
    ref = torch.ones(2, 10, 4, 8)
    limits = {"row_rel_l2_median": 0.01, "row_rel_l2_p90": 0.1}
    good = ref.clone()
    good[1, 9] += 5.0
    assert forms.check(limits, good, ref) is None
    bad = ref.clone()
    bad[:, :2] += 0.5
    assert forms.check(limits, bad, ref) is not None
    half = ref.clone()
    half[0] += 0.02
    half[1, 0] += 0.02
    assert forms.check(limits, half, ref) is not None
    good[0, 0, 0, 0] = math.nan
    assert forms.check(limits, good, ref) is not None


def test_e8m0_scales_compare_as_bytes() -> None:
    stored = T([127, 130], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert forms.check("exact", T([127, 130], dtype=torch.uint8), stored) is None
    assert forms.check("exact", T([1.0, 8.0]), stored) is None
    assert forms.check("exact", T([127, 131], dtype=torch.uint8), stored) is not None


@pytest.mark.parametrize(
    ("chosen", "fine"),
    [
        ([[10, 12, 13]], True),
        ([[13, 10, 11]], True),
        ([[10, 11, -1]], False),
        ([[10, 10, 11]], False),
        ([[11, 12, 13]], False),
        ([[10, 11, 14]], False),
        ([[10, 11, 12, 13]], False),
        ([[9, 10, 11]], False),
    ],
)
def test_topk_set_with_offset(chosen: list[list[int]], fine: bool) -> None:
    must, may = T([[True, False, False, False, False]]), T([[True, True, True, True, False]])
    assert (forms.topk_set(T(chosen), must, may, T([3]), offset=10) is None) is fine


@pytest.mark.parametrize(
    ("chosen", "fine"), [([0, 1], True), ([1, 0], True), ([0, 2], True), ([1, 2], False), ([0, 3], False), ([0], False)]
)
def test_topk_of_allows_swaps_at_the_edge_only(chosen: list[int], fine: bool) -> None:
    scores = T([[9.0, 1.0, 1.0005, 0.5]])
    assert (forms.topk_of(T([chosen]), T([[0, 1]]), scores) is None) is fine


def test_topk_of_without_scores_wants_the_stored_set() -> None:
    assert forms.topk_of(T([2, 1, -1]), T([1, 2, -1]), None) is None
    assert forms.topk_of(T([2, 3, -1]), T([1, 2, -1]), None) is not None


def test_expert_maps_have_no_order() -> None:
    experts, weights = T([[4, 1]]), T([[0.25, 0.75]])
    assert forms.expert_map(T([[1, 4]]), T([[0.75, 0.25]]), experts, weights) is None
    assert forms.expert_map(T([[1, 4]]), T([[0.25, 0.75]]), experts, weights) is not None
    assert forms.expert_map(T([[1, 5]]), T([[0.75, 0.25]]), experts, weights) is not None
    assert forms.expert_map(T([[1, 4]]), T([[0.7501, 0.25]]), experts, weights) is not None


def test_unknown_forms_are_errors() -> None:
    with pytest.raises(GoldenFormatError, match="unknown tolerance form"):
        forms.check("about", T([1.0]), T([1.0]))
    with pytest.raises(GoldenFormatError, match="unknown tolerance form"):
        forms.check({"atol": 1.0}, T([1.0]), T([1.0]))
