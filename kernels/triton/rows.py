"""Checksums of rows, alone and together with the copy they vouch for: every word is read once.

The reference widens rows to int64 in several passes; lanes_64 has no order, so parts are added with integer atomics and
the sum is the same whatever order they come in.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.reference.rows import lane_seed, lane_weights

_BLOCK = 4096
"""Words of one program: 16 KiB."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rows_kernel(  # type: ignore[no-untyped-def]
    source,
    origins,
    target,
    places,
    weights,
    sums,
    words,
    source_stride,
    target_stride,
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < words
    value = tl.load(source + tl.load(origins + item) * source_stride + offsets, mask=inside, other=0)
    if STORE:
        tl.store(target + tl.load(places + item) * target_stride + offsets, value, mask=inside)
    weight = tl.load(weights + offsets, mask=inside, other=0)
    tl.atomic_add(sums + item, tl.sum((value.to(tl.int64) & 0xFFFFFFFF) * weight, axis=0))


def checksum_rows(rows: torch.Tensor, indexes: torch.Tensor) -> torch.Tensor:
    """See kernels/reference/rows.py."""
    return _launch(rows, indexes, rows, indexes, store=False)


def copy_rows_checksummed(
    source: torch.Tensor, source_indexes: torch.Tensor, rows: torch.Tensor, indexes: torch.Tensor
) -> torch.Tensor:
    """See kernels/reference/rows.py. What is summed is the very word that is stored."""
    return _launch(source, source_indexes, rows, indexes, store=True)


def _launch(
    source: torch.Tensor, origins: torch.Tensor, target: torch.Tensor, places: torch.Tensor, *, store: bool
) -> torch.Tensor:
    words = source.view(torch.int32)
    count, width = origins.shape[0], words.shape[1]
    sums = torch.full((count,), lane_seed(width), dtype=torch.int64, device=source.device)
    if count:
        into = target.view(torch.int32)
        kernel: Any = _rows_kernel
        with torch.cuda.device(source.device):
            kernel[(count, triton.cdiv(width, _BLOCK))](
                words,
                origins,
                into,
                places,
                lane_weights(width, source.device),
                sums,
                width,
                words.stride(0),
                into.stride(0),
                STORE=store,
                BLOCK=_BLOCK,
                num_warps=8,
            )
    return sums
