"""Rotary position embedding: V4.1's and V3's frequencies, adjacent and half-split pairing (spec §5, §14)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Yarn:
    """Context extension by frequency interpolation. No magnitude scaling: a model that has one applies it itself."""

    factor: float
    original_tokens: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def rope_frequencies(rotary_dim: int, base: float, yarn: Yarn | None = None) -> torch.Tensor:
    """Inverse frequencies ``[rotary_dim/2]`` float32 (§5). ``yarn`` with 0 original tokens means none."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    plain = 1.0 / (torch.tensor(base, dtype=torch.float32) ** exponents)
    if yarn is None or yarn.original_tokens <= 0:
        return plain

    def turns_to_dim(turns: float) -> float:
        return rotary_dim * math.log(yarn.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turns_to_dim(yarn.beta_fast)), 0)
    high = min(math.ceil(turns_to_dim(yarn.beta_slow)), rotary_dim - 1)
    steps = torch.arange(rotary_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def rope_table(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``positions [T] int64, frequencies [R] float32 → cos, sin [T, R]`` float32.

    The angle is the float32 product: at position 10⁶ a float64 one would give a cosine 3e-2 away (§5).
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def _per_row(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``[T, R] → [T, 1, …, 1, R]`` beside ``x [T, ..., D]``."""
    return table.view(table.shape[0], *(1,) * (x.dim() - 2), table.shape[1])


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Rotate adjacent pairs of the last 2·R channels of ``x [T, ..., D]``; the inverse turns back (§5)."""
    keep = x.shape[-1] - 2 * cos.shape[-1]
    c, s = _per_row(cos, x), _per_row(sin, x)
    if inverse:
        s = -s
    even, odd = x[..., keep:].float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :keep], turned), dim=-1) if keep else turned


def rope_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Half-split pairing: channel c of the last 2·R turns with channel c + R (§14; V3 without interleaving)."""
    keep = x.shape[-1] - 2 * cos.shape[-1]
    c, s = _per_row(cos, x), _per_row(sin, x)
    if inverse:
        s = -s
    first, second = x[..., keep:].float().chunk(2, dim=-1)
    turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)
    return torch.cat((x[..., :keep], turned), dim=-1) if keep else turned


def rope_table_2d(
    rows: torch.Tensor, columns: torch.Tensor, head_dim: int, base: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Vision table ``cos, sin [T, head_dim/2]``: angles of the row, then of the column; ``head_dim/4`` frequencies
    ``base^(-2i/(head_dim/2))`` (§14). For `rope_halves`."""
    frequencies = rope_frequencies(head_dim // 2, base).to(rows.device)
    angles = torch.cat((rows.float().unsqueeze(-1) * frequencies, columns.float().unsqueeze(-1) * frequencies), dim=-1)
    return angles.cos(), angles.sin()
