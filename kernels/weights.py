"""Weights as the operators take them: a plain tensor, or quantised values with their scales (spec §2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class Fp8Weight:
    """e4m3 values with one power-of-two scale per 32 × 32 block: W = values · 2^(byte − 127)."""

    values: torch.Tensor
    """[out, in] float8_e4m3fn."""
    scales: torch.Tensor
    """[⌈out/32⌉, ⌈in/32⌉] float8_e8m0fnu."""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


@dataclass(frozen=True)
class Fp4Weight:
    """Two e2m1 codes per byte (low nibble = even input channel), one power-of-two scale per row and 32 channels."""

    packed: torch.Tensor
    """[out, in/2] int8 or uint8."""
    scales: torch.Tensor
    """[out, in/32] float8_e8m0fnu."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.packed.shape[0], self.packed.shape[1] * 2))


Weight: TypeAlias = torch.Tensor | Fp8Weight | Fp4Weight
"""Matrix [out, in] of a linear layer. A quantised one makes its operator quantise the input too (spec §3.6)."""


@dataclass(frozen=True)
class Swiglu:
    """The three matrices of one gated feed-forward network or expert."""

    gate: Weight
    """w1 [intermediate, hidden]."""
    up: Weight
    """w3 [intermediate, hidden]."""
    down: Weight
    """w2 [hidden, intermediate]."""


@dataclass(frozen=True)
class Fp8Rows:
    """Embedding table of e4m3 rows, one power-of-two scale per row and 32 channels (Engram, spec §13)."""

    values: torch.Tensor
    """[rows, width] float8_e4m3fn."""
    scales: torch.Tensor
    """[rows, width/32] float8_e8m0fnu."""
