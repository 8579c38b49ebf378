"""Attention of every row over its own short list of keys, with a sink logit per head (V4.1, spec §7)."""

from __future__ import annotations

import torch
from torch.nn import functional

from headrace.kernels.reference.linear import DEPTH, ROW_MULTIPLE, WIDTH_MULTIPLE


def sparse_attention(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """``o_h = Σ_k e^{s_k} key_k / (Σ_k e^{s_k} + e^{sink_h})`` with ``s = scale · q·key``; a key is its own value.

    ``q [T, H, D]``, ``keys [T, K, D]``, ``valid [T, K]`` bool, ``sink [H]`` float32. Returns [T, H, D] in q's dtype,
    exactly 0 for a row without keys. Arithmetic is float32 with an exact softmax. K is the same for every row of every
    call of a model, so each row is one product of fixed shape; heads and keys are padded as in linear.py, since threads
    would cut a lone row otherwise. So a row's bytes do not depend on the batch (L5). Keys at invalid places must be
    finite.
    """
    heads, more = q.shape[1], -keys.shape[1] % WIDTH_MULTIPLE
    wide = functional.pad(keys.float(), (0, 0, 0, more))
    query = functional.pad(q.float(), (0, 0, 0, -heads % ROW_MULTIPLE))
    scores = torch.bmm(query, wide.transpose(1, 2)) * scale
    scores = scores.masked_fill(~functional.pad(valid, (0, more)).unsqueeze(1), float("-inf"))
    sinks = functional.pad(sink.float(), (0, -heads % ROW_MULTIPLE)).view(1, -1, 1).expand(q.shape[0], -1, 1)
    weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    # In pieces, as in linear.py.
    mixed = torch.bmm(weights[..., :DEPTH], wide[:, :DEPTH])
    for first in range(DEPTH, wide.shape[1], DEPTH):
        mixed = mixed + torch.bmm(weights[..., first : first + DEPTH], wide[:, first : first + DEPTH])
    return mixed[:, :heads].to(q.dtype)
