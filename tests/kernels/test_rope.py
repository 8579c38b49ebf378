"""Rotary embedding: pairings, inverse, frequencies (spec §5, §14)."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.kernels.reference.rope import Yarn, rope, rope_frequencies, rope_halves, rope_table, rope_table_2d


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("turn", [rope, rope_halves])
def test_the_inverse_turns_back_and_other_channels_stay(turn) -> None:  # type: ignore[no-untyped-def]
    x = random(7, 3, 64)
    cos, sin = rope_table(torch.arange(7) + 100, rope_frequencies(32, 1e4))
    turned = turn(x, cos, sin)
    assert torch.equal(turned[..., :32], x[..., :32])
    assert not torch.equal(turned[..., 32:], x[..., 32:])
    assert torch.allclose(turn(turned, cos, sin, inverse=True), x, atol=1e-6)


def test_the_pairings_differ_by_a_permutation_of_channels() -> None:
    x = random(5, 48)
    cos, sin = rope_table(torch.arange(5) * 31, rope_frequencies(48, 1e4))
    halves = torch.cat((x[:, 0::2], x[:, 1::2]), dim=1)
    adjacent = rope(x, cos, sin)
    assert torch.equal(rope_halves(halves, cos, sin), torch.cat((adjacent[:, 0::2], adjacent[:, 1::2]), dim=1))


def test_scores_depend_on_distance_alone() -> None:
    q, k = random(1, 64), random(1, 64) + 1
    frequencies = rope_frequencies(64, 1e4)

    def score(p: int, q_at: int) -> float:
        return float(
            rope(q, *rope_table(torch.tensor([p]), frequencies)).double()
            @ rope(k, *rope_table(torch.tensor([q_at]), frequencies)).double().T
        )

    assert math.isclose(score(50, 3), score(147, 100), rel_tol=1e-4)


def test_angles_are_float32_products() -> None:
    """§5: a float64 product would differ by up to 3e-2 at a million."""
    frequencies = rope_frequencies(64, 1e4)
    cos, _ = rope_table(torch.tensor([1_000_003]), frequencies)
    wide = (1_000_003 * frequencies.double()).cos()
    assert (cos[0].double() - wide).abs().max() > 1e-3
    assert torch.equal(cos[0], (torch.tensor(1_000_003.0) * frequencies).cos())


def test_yarn_keeps_fast_frequencies_and_stretches_slow_ones() -> None:
    plain = rope_frequencies(64, 160000.0)
    scaled = rope_frequencies(64, 160000.0, Yarn(factor=16, original_tokens=65536))
    assert torch.equal(scaled[0], plain[0])
    assert torch.allclose(scaled[-1], plain[-1] / 16)
    assert torch.equal(rope_frequencies(64, 160000.0, Yarn(factor=16, original_tokens=0)), plain)


def test_the_vision_table_has_row_angles_then_column_angles() -> None:
    cos, sin = rope_table_2d(torch.tensor([0, 3]), torch.tensor([5, 0]), 16, 10000.0)
    assert cos.shape == (2, 8)
    assert torch.equal(cos[0, :4], torch.ones(4))
    assert torch.equal(sin[1, 4:], torch.zeros(4))
    assert torch.allclose(sin[1, 0], torch.tensor(3.0).sin())
