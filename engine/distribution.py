"""From logits to the distribution a token is drawn from, and the draw itself (spec §16).

Order everywhere: larger logit first, lower id among equals. top_p, top_k and min_p each keep a beginning of that order,
so only the beginning needs sorting: on the CPU the first few hundred tokens, more for the rows that need more; on a
device, where a host read would stall the step, the whole vocabulary. The drawn token is the same either way.
"""

from __future__ import annotations

import torch

from headrace.engine.sampling_params import GREEDY_BELOW

PREFIXES = (256, 4096)
"""Tokens sorted at first and at the second try on the CPU (measured at 49,152 logits: 0.25 ms a row, not 4.9)."""


def scale_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """``logits [S, vocab] · (1/temperature [S])`` float32."""
    return logits.float() * (1.0 / temperature.clamp_min(GREEDY_BELOW)).unsqueeze(-1)


def ranked(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row of ``[S, vocab]`` and their ids, in order; equals by lower id."""
    width = values.shape[-1]
    if values.device.type == "cpu" and count + 1 < width:
        top, ids = values.topk(count + 1, dim=-1)
        if bool((top[:, count - 1] > top[:, count]).all()):  # else equals at the edge: which ids a top-k takes is open
            by_id, order = ids[:, :count].sort(dim=-1)
            in_order, rank = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
            return in_order, by_id.gather(-1, rank)
    in_order, ids = values.sort(dim=-1, descending=True, stable=True)
    return in_order[:, :count], ids[:, :count]


def keep_ranked(
    probabilities: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Which of a row's likeliest tokens ``[S, n]``, in order, all three keep; ``top_p, top_k, min_p [S]``.

    top_p drops a token if the mass strictly before it exceeds top_p (1 is off); top_k ≤ 0 is off. The kept ones are a
    beginning of the row.
    """
    before = probabilities.cumsum(dim=-1, dtype=torch.float64).roll(1, dims=-1)
    before[:, 0] = 0.0
    ranks = torch.arange(probabilities.shape[-1], device=probabilities.device)
    nucleus = (before <= top_p.unsqueeze(-1)) | (top_p >= 1.0).unsqueeze(-1)
    best = (ranks < top_k.unsqueeze(-1)) | (top_k <= 0).unsqueeze(-1)
    likely = probabilities >= min_p.unsqueeze(-1) * probabilities[:, :1]
    return nucleus & best & likely


def distribution(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probabilities ``[S, vocab]`` float32 that tokens are drawn from, −inf where dropped.

    ``temperature, top_p, top_k, min_p [S]``. A temperature under 1e-5 counts as 1e-5 without truncation.
    """
    greedy = temperature < GREEDY_BELOW
    z = scale_logits(logits, temperature)
    _, order = ranked(z, z.shape[-1])
    kept = keep_ranked(
        torch.softmax(z, dim=-1).gather(-1, order),
        torch.where(greedy, 1.0, top_p),
        torch.where(greedy, 0, top_k),
        torch.zeros_like(top_p) if min_p is None else torch.where(greedy, 0.0, min_p),
    )
    dropped = torch.ones_like(kept).scatter(-1, order, ~kept)
    return torch.log_softmax(z.masked_fill(dropped, float("-inf")), dim=-1)


def pick(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """First index ``[S]`` whose cumulative weight exceeds ``u · total`` in float64; ``weights [S, n]`` need not sum to
    1, ``u [S]`` float64 in [0, 1)."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = (u * cumulative[:, -1]).unsqueeze(-1)
    index = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return index.clamp_max(weights.shape[-1] - 1)


def draw(z: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Ids ``[S]`` drawn from the softmax of ``z [S, vocab]``."""
    return pick(torch.softmax(z, dim=-1), u)


def draw_truncated(
    z: torch.Tensor, u: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Ids ``[S]`` drawn from the softmax of ``z [S, vocab]`` under top_p, top_k and min_p ``[S]``."""
    probabilities, vocab = torch.softmax(z, dim=-1), z.shape[-1]
    if z.device.type != "cpu":
        return _draw_ranked(z, probabilities, vocab, u, top_p, top_k, min_p)[0]
    ids = torch.zeros(z.shape[0], dtype=torch.int64)
    rows = torch.arange(z.shape[0])
    for count in (*(n for n in PREFIXES if n < vocab), vocab):
        drawn, complete = _draw_ranked(
            z[rows], probabilities[rows], count, u[rows], top_p[rows], top_k[rows], min_p[rows]
        )
        ids[rows] = drawn
        rows = rows[~complete]
        if rows.numel() == 0:
            break
    return ids


def _draw_ranked(
    z: torch.Tensor,
    probabilities: torch.Tensor,
    count: int,
    u: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws among the ``count`` likeliest, and for which rows these hold all that is kept (then the draw stands).

    The kept are laid out by id before the draw, so that the result is that of the whole vocabulary.
    """
    _, order = ranked(z, count)
    in_order = probabilities.gather(-1, order)
    kept = keep_ranked(in_order, top_p, top_k, min_p)
    by_id, place = order.sort(dim=-1)
    weights = in_order.masked_fill(~kept, 0.0).gather(-1, place)
    ids = by_id.gather(-1, pick(weights, u).unsqueeze(-1)).squeeze(-1)
    return ids, ~kept[:, -1] | (count == z.shape[-1])
