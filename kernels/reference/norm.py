"""Root-mean-square normalisation (spec §4)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight · x · rsqrt(mean(x²) + eps)`` over the last axis in float32, cast to x's dtype once, at the end.

    V4.1's eps is 1e-20: a row of 1e-12 is brought to unit size, a row of zeros stays zero.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
