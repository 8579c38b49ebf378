"""Hyper-connections (V4.1, spec §6): coefficients with their Sinkhorn iterations in one kernel, collapse and expansion
in one each. The reference's coefficients take some ninety kernels, twice a layer, most of a small decode step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.ops import LinearFp32, Mixes
from headrace.kernels.reference.hyper import project_streams
from headrace.kernels.reference.linear import linear_fp32

_ROWS = 16
"""Rows of one program of the coefficients."""
_COLUMNS = 1024
"""Channels of one program of collapse and expansion."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _split_kernel(  # type: ignore[no-untyped-def]
    projected,
    scale,
    base,
    pre,
    post,
    combine,
    count,
    eps,
    HC: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    stream = tl.arange(0, HC)
    inside = (row < count)[:, None]
    raw = projected + row[:, None] * ((2 + HC) * HC) + stream[None, :]
    place = row[:, None] * HC + stream[None, :]
    first = tl.load(raw, mask=inside, other=0.0) * tl.load(scale) + tl.load(base + stream)[None, :]
    tl.store(pre + place, 1.0 / (1.0 + tl.exp(-first)) + eps, mask=inside)
    second = tl.load(raw + HC, mask=inside, other=0.0) * tl.load(scale + 1) + tl.load(base + HC + stream)[None, :]
    tl.store(post + place, 2.0 / (1.0 + tl.exp(-second)), mask=inside)

    inside_3d = (row < count)[:, None, None]
    cell = (stream[:, None] * HC + stream[None, :])[None, :, :]
    at = row[:, None, None] * ((2 + HC) * HC) + 2 * HC + cell
    m = tl.load(projected + at, mask=inside_3d, other=0.0) * tl.load(scale + 2) + tl.load(base + 2 * HC + cell)
    m = tl.exp(m - tl.max(m, axis=2)[:, :, None])
    m = m / tl.sum(m, axis=2)[:, :, None] + eps
    m = m / (tl.sum(m, axis=1)[:, None, :] + eps)
    for _ in range(ITERATIONS - 1):
        m = m / (tl.sum(m, axis=2)[:, :, None] + eps)
        m = m / (tl.sum(m, axis=1)[:, None, :] + eps)
    tl.store(combine + row[:, None, None] * (HC * HC) + cell, m, mask=inside_3d)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _collapse_kernel(streams, pre, out, width, HC: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(HC):
        value = tl.load(streams + (row * HC + j) * width + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(pre + row * HC + j) * value
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _expand_kernel(  # type: ignore[no-untyped-def]
    x, streams, post, combine, out, width, HC: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    own = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(HC):
        total = tl.load(post + row * HC + k) * own
        for j in tl.static_range(HC):
            value = tl.load(streams + (row * HC + j) * width + columns, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(combine + (row * HC + j) * HC + k) * value
        tl.store(out + (row * HC + k) * width + columns, total.to(out.dtype.element_ty), mask=inside)


def hyper_mixes(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    product: LinearFp32 = linear_fp32,
) -> Mixes:
    """See kernels/reference/hyper.py. ``streams [T, hc, d]``, hc a power of two."""
    projected = project_streams(streams, fn, norm_eps=norm_eps, product=product)
    count, hc = streams.shape[0], streams.shape[1]
    device = streams.device
    pre, post = (torch.empty((count, hc), dtype=torch.float32, device=device) for _ in range(2))
    combine = torch.empty((count, hc, hc), dtype=torch.float32, device=device)
    if count:
        kernel: Any = _split_kernel
        with torch.cuda.device(device):
            kernel[(triton.cdiv(count, _ROWS),)](
                projected.contiguous(),
                scale,
                base,
                pre,
                post,
                combine,
                count,
                hc_eps,
                HC=hc,
                ITERATIONS=iterations,
                ROWS=_ROWS,
                num_warps=4,
            )
    return Mixes(pre, post, combine)


def hyper_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """See kernels/reference/hyper.py."""
    count, hc, width = streams.shape
    out = torch.empty((count, width), dtype=streams.dtype, device=streams.device)
    if count:
        kernel: Any = _collapse_kernel
        with torch.cuda.device(streams.device):
            kernel[(count, triton.cdiv(width, _COLUMNS))](
                streams.contiguous(), pre.contiguous(), out, width, HC=hc, BLOCK=_COLUMNS, num_warps=4
            )
    return out


def hyper_expand(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
    """See kernels/reference/hyper.py."""
    count, hc, width = streams.shape
    result = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if count:
        kernel: Any = _expand_kernel
        with torch.cuda.device(streams.device):
            kernel[(count, triton.cdiv(width, _COLUMNS))](
                out.contiguous(),
                streams.contiguous(),
                post.contiguous(),
                combine.contiguous(),
                result,
                width,
                HC=hc,
                BLOCK=_COLUMNS,
                num_warps=4,
            )
    return result
