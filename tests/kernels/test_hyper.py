"""Hyper-connections against a plain per-token twin (spec §6)."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.kernels.reference.hyper import hyper_collapse, hyper_expand, hyper_mixes


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def sinkhorn(logits: list[list[float]], eps: float, iterations: int) -> list[list[float]]:
    n = len(logits)
    c = []
    for row in logits:
        total = sum(math.exp(v - max(row)) for v in row)
        c.append([math.exp(v - max(row)) / total + eps for v in row])

    def columns() -> None:
        for k in range(n):
            total = sum(c[j][k] for j in range(n)) + eps
            for j in range(n):
                c[j][k] /= total

    columns()
    for _ in range(iterations - 1):
        for j in range(n):
            total = sum(c[j]) + eps
            c[j] = [v / total for v in c[j]]
        columns()
    return c


@pytest.mark.parametrize(("hc", "iterations"), [(4, 20), (2, 1), (3, 5)])
def test_mixes_match_the_formula(hc: int, iterations: int) -> None:
    d, eps = 32, 1e-6
    streams, fn = random(3, hc, d), random((2 + hc) * hc, hc * d, seed=1) * 0.1
    scale, base = torch.tensor([0.7, 1.3, 0.9]), random((2 + hc) * hc, seed=2)
    got = hyper_mixes(streams, fn, scale, base, norm_eps=1e-20, hc_eps=eps, iterations=iterations)
    for t in range(3):
        v = streams[t].flatten().double()
        m = (fn.double() @ v) / math.sqrt(float(v.square().mean()) + 1e-20)
        for j in range(hc):
            pre = 1 / (1 + math.exp(-float(m[j] * scale[0] + base[j]))) + eps
            post = 2 / (1 + math.exp(-float(m[hc + j] * scale[1] + base[hc + j])))
            assert got.pre[t, j].item() == pytest.approx(pre, abs=1e-5)
            assert got.post[t, j].item() == pytest.approx(post, abs=1e-5)
        logits = (m[2 * hc :] * scale[2] + base[2 * hc :]).reshape(hc, hc).tolist()
        assert torch.allclose(
            got.combine[t].double(), torch.tensor(sinkhorn(logits, eps, iterations)).double(), atol=1e-5
        )


def test_collapse_and_expand_match_the_sums() -> None:
    streams, out = random(5, 4, 16), random(5, 16, seed=1)
    pre, post, combine = random(5, 4, seed=2), random(5, 4, seed=3), random(5, 4, 4, seed=4)
    assert torch.allclose(hyper_collapse(streams, pre), torch.einsum("tj,tjd->td", pre, streams), atol=1e-5)
    expected = torch.einsum("tk,td->tkd", post, out) + torch.einsum("tjk,tjd->tkd", combine, streams)
    assert torch.allclose(hyper_expand(out, streams, post, combine), expected, atol=1e-5)
    assert hyper_collapse(streams.bfloat16(), pre).dtype == torch.bfloat16


def test_a_zero_stream_has_finite_mixes() -> None:
    mixes = hyper_mixes(
        torch.zeros(1, 4, 8), random(24, 32), torch.ones(3), torch.zeros(24), norm_eps=1e-20, hc_eps=1e-6, iterations=20
    )
    assert all(part.isfinite().all() for part in mixes)
