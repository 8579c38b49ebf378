"""Routers and experts against plain twins (spec §10)."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.kernels.ops import Routing
from headrace.kernels.reference.moe import experts_dense, experts_grouped, route, route_grouped, swiglu
from headrace.kernels.weights import Swiglu


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def experts_of(count: int, hidden: int, inner: int) -> list[Swiglu]:
    return [
        Swiglu(random(inner, hidden, seed=i), random(inner, hidden, seed=i + 50), random(hidden, inner, seed=i + 90))
        for i in range(count)
    ]


def test_the_bias_chooses_and_the_score_weighs() -> None:
    x, gate = random(30, 16), random(8, 16, seed=1)
    bias, image_bias = random(8, seed=2) * 0.5, random(8, seed=3) * 0.5
    mask = torch.arange(30) % 3 == 0
    got = route(x, gate, bias, image_bias, mask, top_k=3, scale=1.5)
    for t in range(30):
        scores = [math.sqrt(math.log1p(math.exp(z))) for z in (gate.double() @ x[t].double()).tolist()]
        b = (image_bias if mask[t] else bias).tolist()
        chosen = sorted(range(8), key=lambda e: (-(scores[e] + b[e]), e))[:3]
        assert got.experts[t].tolist() == chosen
        total = sum(scores[e] for e in chosen)
        assert got.weights[t].tolist() == pytest.approx([scores[e] / total * 1.5 for e in chosen], abs=1e-5)


def test_one_expert_is_not_normalised() -> None:
    x, gate = random(4, 16), random(8, 16, seed=1)
    got = route(x, gate, torch.zeros(8), None, None, top_k=1, scale=2.0)
    assert not torch.allclose(got.weights, torch.full((4, 1), 2.0))


def test_equal_scores_go_to_the_lower_id() -> None:
    got = route(torch.ones(2, 8), torch.zeros(6, 8), torch.tensor([0.0, 1, 1, 0, 1, 0]), None, None, top_k=2, scale=1.0)
    assert got.experts.tolist() == [[1, 2], [1, 2]]


def test_groups_limit_the_choice() -> None:
    """V3: top_k within the best groups, a group judged by its two best biased scores."""
    x, gate, bias = random(40, 16), random(12, 16, seed=1), random(12, seed=2) * 0.3
    got = route_grouped(x, gate, bias, top_k=4, groups=4, top_groups=2, scale=2.5, normalise=True)
    for t in range(40):
        scores = [1 / (1 + math.exp(-z)) for z in (gate.double() @ x[t].double()).tolist()]
        biased = [s + b for s, b in zip(scores, bias.double().tolist(), strict=True)]
        group = [sum(sorted(biased[3 * g : 3 * g + 3])[-2:]) for g in range(4)]
        kept = sorted(range(4), key=lambda g: (-group[g], g))[:2]
        allowed = [e for e in range(12) if e // 3 in kept]
        chosen = sorted(allowed, key=lambda e: (-biased[e], e))[:4]
        assert got.experts[t].tolist() == chosen
        total = sum(scores[e] for e in chosen)
        assert got.weights[t].tolist() == pytest.approx([scores[e] / total * 2.5 for e in chosen], abs=1e-5)


def test_grouped_experts_equal_dense_ones() -> None:
    """The plain twin: every expert on every row."""
    x, experts = random(25, 16), experts_of(6, 16, 24)
    routing = route(x, random(6, 16, seed=9), torch.zeros(6), None, None, top_k=2, scale=1.5)
    grouped = experts_grouped(x, routing, experts, limit=1.0)
    assert torch.allclose(grouped, experts_dense(x, routing, experts, limit=1.0), atol=1e-5)
    assert grouped.dtype == torch.float32


def test_the_sum_over_experts_is_the_weighted_sum() -> None:
    x, experts = random(3, 16), experts_of(4, 16, 8)
    routing = Routing(torch.tensor([[0, 3], [2, 1], [1, 3]]), torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.0, 1.0]]))
    got = experts_grouped(x, routing, experts)
    for t in range(3):
        expected = sum(
            swiglu(x[t : t + 1], experts[e])[0] * w
            for e, w in zip(routing.experts[t].tolist(), routing.weights[t].tolist(), strict=True)
        )
        assert torch.allclose(got[t], torch.as_tensor(expected), atol=1e-4, rtol=1e-4)


def test_the_gate_is_clamped_from_above_only() -> None:
    """§10: the asymmetry of the clamp."""
    one = torch.ones(1, 1)
    weights = Swiglu(gate=one, up=one, down=one)
    big = torch.tensor([[50.0]])
    assert swiglu(big, weights, limit=10.0).item() == pytest.approx(100.0, rel=1e-3)
    assert swiglu(-big, weights, limit=10.0).abs().item() < 1e-15
    assert swiglu(big, weights).item() == pytest.approx(2500.0)
