"""Linears: quantised weights, padding of the batch-invariant form."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference.linear import (
    linear,
    linear_batch_invariant,
    linear_fp32,
    linear_widening,
    matmul_rows,
    widen,
)
from headrace.kernels.reference.quant import round_trip_e4m3
from headrace.kernels.weights import Fp4Weight, Fp8Weight


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def fp8_weight(rows: int, columns: int) -> Fp8Weight:
    scales = torch.randint(118, 130, (-(-rows // 32), -(-columns // 32)), dtype=torch.uint8)
    return Fp8Weight(random(rows, columns).to(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))


def test_fp8_scales_cover_blocks_of_32_by_32() -> None:
    weight = fp8_weight(40, 70)
    wide = widen(weight)
    for row, column in ((0, 0), (31, 31), (32, 31), (39, 69), (5, 64)):
        scale = 2.0 ** (int(weight.scales.view(torch.uint8)[row // 32, column // 32]) - 127)
        assert wide[row, column] == weight.values[row, column].float() * scale
    assert weight.shape == (40, 70)


def test_quantised_weights_quantise_their_input() -> None:
    """§3.6, against a float64 product of the quantised input."""
    x, weight = random(5, 64), fp8_weight(48, 64)
    expected = round_trip_e4m3(x).double() @ widen(weight).double().T
    assert torch.allclose(linear(x, weight).double(), expected, rtol=1e-6, atol=1e-6)
    assert linear(x.bfloat16(), weight).dtype == torch.bfloat16
    packed = Fp4Weight(
        torch.randint(-128, 128, (16, 32), dtype=torch.int8), torch.full((16, 2), 126, dtype=torch.uint8)
    )
    assert packed.shape == (16, 64)
    assert torch.allclose(linear(x, packed).double(), round_trip_e4m3(x).double() @ widen(packed).double().T, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("width", [1, 15, 16, 40])
def test_padding_leaves_no_trace(rows: int, width: int) -> None:
    x, weight, bias = random(rows, 3, 32), random(width, 32), random(width)
    out = linear_batch_invariant(x, weight, bias)
    assert out.shape == (rows, 3, width)
    assert torch.allclose(out, linear(x, weight, bias), atol=1e-5)
    assert torch.equal(matmul_rows(x.bfloat16().float(), weight), matmul_rows(x.bfloat16().float(), weight.clone()))


def test_float32_linears_widen_both_sides() -> None:
    x, weight = random(4, 32).bfloat16(), random(8, 32).bfloat16()
    assert torch.equal(linear_fp32(x, weight), linear(x.float(), weight.float()))


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_widening_changes_the_speed_alone(rows: int) -> None:
    x, weight, bias = random(rows, 64).bfloat16(), random(24, 64).bfloat16(), random(24).bfloat16()
    got = linear_widening(x, weight, bias)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), linear(x.float(), weight.float(), bias.float()), rtol=0.01, atol=0.01)
    assert torch.equal(linear_widening(x.float(), weight.float()), linear(x.float(), weight.float()))


def test_batch_invariance_needs_float32() -> None:
    """L5: refused, never silently given up."""
    with pytest.raises(TypeError, match="need float32"):
        linear_batch_invariant(random(4, 32).bfloat16(), random(8, 32).bfloat16())
    with pytest.raises(TypeError, match="need float32"):
        linear_batch_invariant(random(4, 64), fp8_weight(32, 64))
