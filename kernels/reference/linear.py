"""Linear layers: plain, quantised (spec §3.6), and the batch-invariant form of float32 on the CPU.

Measured (torch 2.13 on AVX2, 2.11 on AVX-512, both with their MKL, 1–32 threads): a float32 product's row changes its
bytes when the call has few rows (fewer than 4 on AVX2, than 16 on AVX-512), when threads split it into fewer, when the
output width is no multiple of 16 (other kernels at the edge, cut by the thread count), when threads share a long inner
dimension (1,024 and more on AVX-512), or, for widths up to 8, when the rows' storage is not aligned. With rows and
width padded to multiples of 16 and the inner dimension taken in pieces of 512 none of these shows.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from headrace.kernels.reference.quant import round_trip_e4m3, widen_fp4_weight, widen_fp8_weight
from headrace.kernels.weights import Fp4Weight, Fp8Weight, Weight

ROW_MULTIPLE = 8
"""Of the batched products of attention and selection, whose inner dimensions are short."""
PRODUCT_ROWS = 16
WIDTH_MULTIPLE = 16
DEPTH = 512
"""Inner dimension of one product; longer ones are summed piece after piece."""


def widen(weight: Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any weight as a plain matrix ``[out, in]``; quantised values are exact in bf16 and float32."""
    if isinstance(weight, Fp8Weight):
        return widen_fp8_weight(weight.values, weight.scales, dtype)
    if isinstance(weight, Fp4Weight):
        return widen_fp4_weight(weight.packed, weight.scales, dtype)
    return weight.to(dtype)


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [..., in] → [..., out]`` in x's dtype; quantised weights take an e4m3 input and accumulate in float32."""
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight, bias)
    return _quantised(x, weight, bias)


def linear_widening(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` that multiplies bf16 in float32, for CPUs without bf16 instructions.

    Measured on AVX2, 576 × 1536: bf16 products stay at 9 GFLOP/s, float32 ones reach 82; from 4 rows on this pays for
    widening the weight in every call.
    """
    wide = isinstance(weight, torch.Tensor) and x.dtype == torch.bfloat16 and x.numel() >= 4 * x.shape[-1]
    if not wide or not isinstance(weight, torch.Tensor):
        return linear(x, weight, bias)
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def _quantised(x: torch.Tensor, weight: Fp8Weight | Fp4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    # Scales are powers of two, so scaling before the product instead of per 32-block changes only the order of sums.
    out = functional.linear(round_trip_e4m3(x).float(), widen(weight))
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Input and weight widened to float32; float32 result (§3.6)."""
    return functional.linear(x.float(), weight.float())


def linear_batch_invariant(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` whose rows do not depend on their neighbours: plain float32 weights on the CPU (L5)."""
    if not isinstance(weight, torch.Tensor) or x.dtype != torch.float32 or weight.dtype != torch.float32:
        raise TypeError("batch-invariant linears need float32 activations and weights: widen the weights at load")
    out = matmul_rows(x, weight)
    return out if bias is None else out + bias


def linear_fp32_batch_invariant(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return matmul_rows(x.float(), weight.float())


def matmul_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [..., in] · weight [out, in]ᵀ`` float32, the same bytes for a row whatever stands beside it."""
    width = weight.shape[0]
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if rows % PRODUCT_ROWS or rows == 0:
        flat = functional.pad(flat, (0, 0, 0, PRODUCT_ROWS - rows % PRODUCT_ROWS))
    if width % WIDTH_MULTIPLE:
        weight = functional.pad(weight, (0, 0, 0, WIDTH_MULTIPLE - width % WIDTH_MULTIPLE))
    out = functional.linear(flat[:, :DEPTH], weight[:, :DEPTH])
    for first in range(DEPTH, weight.shape[1], DEPTH):
        piece = slice(first, first + DEPTH)
        out = out + functional.linear(flat[:, piece], weight[:, piece])
    return out[:rows, :width].reshape(*x.shape[:-1], width)
