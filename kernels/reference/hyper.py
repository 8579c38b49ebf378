"""Hyper-connections: coefficients, collapse of the residual streams, expansion back (spec §6). All in float32."""

from __future__ import annotations

import torch

from headrace.kernels.ops import LinearFp32, Mixes
from headrace.kernels.reference.activation import sigmoid
from headrace.kernels.reference.linear import linear_fp32


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
    """Coefficients of ``streams [T, hc, d]``; the statistic of the flattened stream is applied after the product."""
    projected = project_streams(streams, fn, norm_eps=norm_eps, product=product)
    return split_mixes(projected, scale, base, streams=streams.shape[-2], hc_eps=hc_eps, iterations=iterations)


def project_streams(
    streams: torch.Tensor, fn: torch.Tensor, *, norm_eps: float, product: LinearFp32 = linear_fp32
) -> torch.Tensor:
    """``m [T, (2+hc)·hc]`` = (fn v) · rsqrt(mean(v²) + eps), v stream-major."""
    flat = streams.float().flatten(-2)
    return product(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def split_mixes(
    projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, streams: int, hc_eps: float, iterations: int
) -> Mixes:
    """Sigmoids of the first 2·hc columns, Sinkhorn of the rest: row softmax, then column and row scalings in turn."""
    widths = [streams, streams, streams * streams]
    pre_raw, post_raw, combine_raw = torch.split(projected, widths, dim=-1)
    pre_base, post_base, combine_base = torch.split(base, widths)
    pre = sigmoid(pre_raw * scale[0] + pre_base) + hc_eps
    post = 2 * sigmoid(post_raw * scale[1] + post_base)
    combine = combine_raw * scale[2] + combine_base
    combine = combine.reshape(*combine.shape[:-1], streams, streams)
    return Mixes(pre, post, sinkhorn(torch.softmax(combine, dim=-1) + hc_eps, hc_eps, iterations))


def sinkhorn(matrices: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """``[T, hc, hc]`` scaled by its column sums, then ``iterations − 1`` times by row and by column sums, each plus
    eps. The sums are small batched products with eps added: half the time of sum, add and divide (CPU, T = 8)."""
    count, streams = matrices.shape[:-2], matrices.shape[-1]
    flat = matrices.reshape(-1, streams, streams).clone()
    row, column = flat.new_ones(flat.shape[0], 1, streams), flat.new_ones(flat.shape[0], streams, 1)
    row_eps, column_eps = torch.full_like(row, eps), torch.full_like(column, eps)
    flat.div_(torch.baddbmm(row_eps, row, flat))
    for _ in range(iterations - 1):
        flat.div_(torch.baddbmm(column_eps, flat, column))
        flat.div_(torch.baddbmm(row_eps, row, flat))
    return flat.view(*count, streams, streams)


def hyper_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """``Σ_j pre[j] · streams[j]`` → [T, d]. Streams are added one by one, so a row's bytes are its own."""
    wide = streams.float()
    out = pre[..., 0, None] * wide[..., 0, :]
    for j in range(1, wide.shape[-2]):
        out = out + pre[..., j, None] * wide[..., j, :]
    return out.to(streams.dtype)


def hyper_expand(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
    """``post[k]·out + Σ_j combine[j, k]·streams[j]`` → [T, hc, d]."""
    wide = streams.float()
    mixed = post.unsqueeze(-1) * out.float().unsqueeze(-2)
    for j in range(wide.shape[-2]):
        mixed = mixed + combine[..., j, :, None] * wide[..., j, None, :]
    return mixed.to(streams.dtype)
