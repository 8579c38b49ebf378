"""Engram: n-gram hashing into a table, row lookup, and the gate into the residual streams (spec §13)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.kernels.reference.activation import sigmoid
from headrace.kernels.reference.quant import dequantise_e4m3
from headrace.kernels.weights import Fp8Rows

_LAYER_SEED = 10007


@dataclass(frozen=True)
class EngramConstants:
    """Hash constants of every Engram layer, in config order."""

    primes: torch.Tensor
    """[layers, N−1, heads] int64, no prime used twice anywhere."""
    offsets: torch.Tensor
    """[layers, (N−1)·heads] int64, exclusive prefix sums of a layer's primes."""
    multipliers: torch.Tensor
    """[layers, N] int64, odd."""

    @property
    def table_rows(self) -> torch.Tensor:
        """[layers] int64."""
        return self.primes.sum(dim=(1, 2))


def _is_prime(value: int) -> bool:
    if value < 4:
        return value > 1
    if value % 2 == 0:
        return False
    return all(value % factor for factor in range(3, int(value**0.5) + 1, 2))


def engram_constants(
    layer_ids: tuple[int, ...], max_ngram: int, heads: int, vocab_size: int, compressed_vocab_size: int
) -> EngramConstants:
    """Primes, offsets and multipliers. Every (layer, n) restarts at ``vocab_size`` and skips primes taken before."""
    taken: set[int] = set()
    primes: list[int] = []
    for _ in range(len(layer_ids) * (max_ngram - 1)):
        candidate = vocab_size
        for _ in range(heads):
            while candidate in taken or not _is_prime(candidate):
                candidate += 1
            taken.add(candidate)
            primes.append(candidate)
    table = torch.tensor(primes, dtype=torch.int64).view(len(layer_ids), max_ngram - 1, heads)
    flat = table.flatten(1)
    half_bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    multipliers = [
        np.random.default_rng(_LAYER_SEED * layer).integers(0, half_bound, size=max_ngram, dtype=np.int64) * 2 + 1
        for layer in layer_ids
    ]
    return EngramConstants(
        primes=table,
        offsets=flat.cumsum(1) - flat,
        multipliers=torch.from_numpy(np.stack(multipliers)) if multipliers else torch.zeros(0, max_ngram).long(),
    )


def engram_context(
    token_ids: torch.Tensor,
    image_mask: torch.Tensor,
    sequence_of_row: torch.Tensor,
    row_in_sequence: torch.Tensor,
    lookback: torch.Tensor,
    token_map: torch.Tensor,
    pad_id: int,
) -> torch.Tensor:
    """Compressed ids ``[T, N]`` each row hashes, newest first, over the ragged rows of a step.

    ``token_ids, image_mask, sequence_of_row, row_in_sequence [T]`` (the last: position − the sequence's first new
    position); ``lookback [B, N−1]`` ids before the chunk, oldest first, negative where there is none or an image
    stands; ``token_map [vocab]``. ``pad_id`` (compressed) takes the place of what precedes position 0, of image
    positions, and of everything older than an image position. An id outside the map counts as an image (L13).
    """
    length = lookback.shape[1] + 1
    ids = torch.where(image_mask, -1, token_ids)
    back = torch.arange(length, device=ids.device)
    inside = row_in_sequence[:, None] - back
    chunk_row = (torch.arange(ids.shape[0], device=ids.device)[:, None] - back).clamp_min(0)
    if length > 1:
        before = lookback[sequence_of_row[:, None], (inside + length - 1).clamp(0, length - 2)]
        raw = torch.where(inside >= 0, ids[chunk_row], before)
    else:
        raw = ids[:, None]
    known = (raw >= 0) & (raw < token_map.shape[0])
    usable = known.cumprod(dim=1).bool()
    return torch.where(usable, token_map[raw.clamp(0, token_map.shape[0] - 1)], pad_id)


def engram_hash(
    context: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Rows ``[T, (N−1)·h]`` of one layer from ``context [T, N]``; columns n = 2 heads first, then n = 3, …"""
    products = context * multipliers
    mixed = products[:, 0]
    columns = []
    for n in range(1, context.shape[1]):
        mixed = mixed ^ products[:, n]
        columns.append(mixed[:, None] % primes[n - 1])
    return torch.cat(columns, dim=1) + offsets


def engram_lookup(rows: torch.Tensor, table: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
    """``rows [T, C] → [T, C·width]``; rows outside the table give 0, so shards of a table add up to the whole."""
    held = (rows >= 0) & (rows < table.values.shape[0])
    safe = torch.where(held, rows, 0)
    values = dequantise_e4m3(
        table.values.view(torch.uint8)[safe].view(torch.float8_e4m3fn), table.scales.view(torch.uint8)[safe], dtype
    )
    return torch.where(held.unsqueeze(-1), values, 0).flatten(-2)


def engram_gate(
    streams: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    image_mask: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Streams plus the gated value; the sign bit of the product counts at 0 (as in the checkpoint's code)."""
    r, k = streams.float(), keys.float()
    dot = (r * (q_weight.float() * k_weight.float()) * k).sum(-1)
    dot = dot * torch.rsqrt(r.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps)
    dot = dot * streams.shape[-1] ** -0.5
    gate = sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    gate = torch.where(image_mask.unsqueeze(-1), 0.0, gate)
    return (r + gate.unsqueeze(-1) * value.float().unsqueeze(-2)).to(streams.dtype)
