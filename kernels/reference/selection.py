"""Choosing compressed entries: index scores, the k best with a fixed tie rule, candidate blocks (V4.1, spec §9)."""

from __future__ import annotations

import torch
from torch.nn import functional

from headrace.kernels.reference.linear import ROW_MULTIPLE, WIDTH_MULTIPLE


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``S[g, t, j] = Σ_h relu(q[g, t, h] · keys[g, j]) · weights[g, t, h]`` in float32.

    ``q [G, m, H, I]``, ``keys [G, J, I]`` shared by the m rows of a group, ``weights [G, m, H]`` → [G, m, J].
    The heads are summed pairwise in a fixed tree, so that a score's bytes depend on its own row and key only (L5).
    """
    groups, rows, heads, width = q.shape
    entries, padded = keys.shape[1], _padded_heads(heads)
    keys = functional.pad(keys.float(), (0, 0, 0, -entries % WIDTH_MULTIPLE))
    q = functional.pad(q.float(), (0, 0, 0, padded - heads))
    w = functional.pad(weights.float(), (0, padded - heads))
    products = torch.bmm(q.reshape(groups, rows * padded, width), keys.transpose(1, 2))
    parts = products.view(groups, rows, padded, -1).relu_() * w.unsqueeze(-1)
    while parts.shape[2] > 1:
        half = parts.shape[2] // 2
        parts = parts[:, :, :half] + parts[:, :, half:]
    return parts[:, :, 0, :entries]


def _padded_heads(heads: int) -> int:
    """The next power of two from ROW_MULTIPLE on, so that a product's rows come in multiples of it (see linear.py)."""
    padded = ROW_MULTIPLE
    while padded < heads:
        padded *= 2
    return padded


def best_mask(scores: torch.Tensor, k: int) -> torch.Tensor:
    """True at the k best finite-or-+inf scores of each row of ``[..., J]``; equal scores: lower position first.

    Rows with fewer than k scores above −inf keep all of those. No host read, static shapes.
    """
    width = scores.shape[-1]
    possible = scores > float("-inf")
    if k >= width:
        return possible
    threshold = scores.topk(k, dim=-1).values[..., -1:]
    above = scores > threshold
    ties = (scores == threshold) & possible
    room = k - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1) <= room))


def positions_of(mask: torch.Tensor, k: int) -> torch.Tensor:
    """Ascending positions of the true entries of ``[T, J]``, at most k of them, filled with −1 → int64 [T, k]."""
    rank = mask.cumsum(-1) - 1
    place = torch.where(mask & (rank < k), rank, k)
    out = torch.full((mask.shape[0], k + 1), -1, dtype=torch.int64, device=mask.device)
    out.scatter_(1, place, torch.arange(mask.shape[1], device=mask.device).expand_as(mask))
    return out[:, :k]


def select_entries(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best entries of each row of masked ``scores [T, J]`` (−inf = not reachable) → int64 [T, k], ascending,
    −1 where there are fewer."""
    return positions_of(best_mask(scores, k), k)


def visible_mask(visible: torch.Tensor, width: int) -> torch.Tensor:
    """``visible [T]`` counts → bool [T, width]."""
    return torch.arange(width, device=visible.device) < visible.unsqueeze(-1)


def candidate_blocks(scores: torch.Tensor, visible: torch.Tensor, block: int, count: int) -> torch.Tensor:
    """Blocks that later index sources may search → bool [T, ⌈J/block⌉].

    ``scores [T, J]`` masked; ``visible [T]``. A block's score is its best entry; the block of the newest visible entry
    is always in; with nothing visible no block is.
    """
    blocks = -(-scores.shape[-1] // block)
    padded = functional.pad(scores, (0, blocks * block - scores.shape[-1]), value=float("-inf"))
    best = padded.view(*padded.shape[:-1], blocks, block).amax(-1)
    newest = torch.where(visible > 0, (visible - 1) // block, -1).unsqueeze(-1)
    pinned = torch.arange(blocks, device=scores.device) == newest
    return best_mask(best.masked_fill(pinned, float("inf")), count)


def entries_of_blocks(blocks: torch.Tensor, block: int, width: int) -> torch.Tensor:
    """``bool [T, blocks] → bool [T, width]``: every entry of a chosen block."""
    return blocks.repeat_interleave(block, dim=-1)[..., :width]
