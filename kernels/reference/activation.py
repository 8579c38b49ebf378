"""Activations whose value at an element does not depend on where in the tensor it lies.

Measured (torch 2.13, CPU): sigmoid, silu, softplus, gelu and exp2 use a vector form for whole groups of 16 elements and
another for the rest, with other last bits, so a row's bytes change with the rows beside it (L5). exp, log1p, sqrt,
rsqrt, sin, cos, tanh, softmax and sums over the last axis do not. These are written with the latter.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + e^-x)``; 0 where e^-x overflows."""
    return torch.reciprocal(1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x · sigmoid(x)``."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``ln(1 + e^x)`` without overflow."""
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))
