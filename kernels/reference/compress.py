"""Pooling a group of tokens into one compressed latent (V4.1, spec §8)."""

from __future__ import annotations

import torch


def pool_group(gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``c = Σ_t softmax_t(gate_t) · value_t`` per channel: ``gates, values [T, r, D]`` float32 → [T, D] float32.

    Tokens are added one by one, so a row's bytes are its own (L5). A gate of −inf leaves its token out.
    """
    shares = torch.exp(gates - gates.amax(1, keepdim=True))
    total, pooled = shares[:, 0], shares[:, 0] * values[:, 0]
    for t in range(1, gates.shape[1]):
        total = total + shares[:, t]
        pooled = pooled + shares[:, t] * values[:, t]
    return pooled / total
