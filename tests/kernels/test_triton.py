"""Triton's operators beside the references; they run where a CUDA device is."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.available import has_triton
from headrace.kernels.reference import hyper, norm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
SHAPES = [(1, 64), (5, 128), (37, 1000), (3, 7168)]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(
        "cuda", dtype
    )


def limits(dtype: torch.dtype) -> dict[str, float]:
    """One rounding of the result; sums run in another order."""
    return {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}


def test_triton_is_there() -> None:
    assert has_triton("cuda")
    assert not has_triton("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    from headrace.kernels.triton.norm import rms_norm

    x, weight = random(rows, 2 * width, dtype=dtype), random(width, dtype=dtype)
    for part in (x[:, :width], x[:, width:].contiguous(), x.view(rows, 2, width), x[:0, :width]):
        torch.testing.assert_close(rms_norm(part, weight, 1e-20), norm.rms_norm(part, weight, 1e-20), **limits(dtype))
    small = torch.full((1, width), 1e-12, device="cuda", dtype=dtype)
    torch.testing.assert_close(rms_norm(small, weight, 1e-20), norm.rms_norm(small, weight, 1e-20), **limits(dtype))
    assert rms_norm(small * 0, weight, 1e-20).count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize(("rows", "width"), [*SHAPES, (0, 64)])
def test_hyper_connections(rows: int, width: int, streams: int, dtype: torch.dtype) -> None:
    from headrace.kernels.triton import hyper as fused

    x, out = random(rows, streams, width, dtype=dtype), random(rows, width, dtype=dtype)
    mixes = (2 + streams) * streams
    fn, base, scale = random(mixes, streams * width) * 0.05, random(mixes), random(3)
    options = {"norm_eps": 1e-20, "hc_eps": 1e-6, "iterations": 20}
    expected = hyper.hyper_mixes(x, fn, scale, base, **options)  # type: ignore[arg-type]
    got = fused.hyper_mixes(x, fn, scale, base, **options)  # type: ignore[arg-type]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(fused.hyper_collapse(x, got.pre), hyper.hyper_collapse(x, got.pre), **limits(dtype))
    torch.testing.assert_close(
        fused.hyper_expand(out, x, got.post, got.combine),
        hyper.hyper_expand(out, x, got.post, got.combine),
        **limits(dtype),
    )
