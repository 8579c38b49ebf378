"""From logits to tokens, for all rows of a step at once, on the device (spec §16, spec/protocol.md).

The host decides beforehand which rows need what (`SamplingBatch`), so nothing here reads a device tensor back. A row's
token depends on its logits and its `RowSampling` alone, never on the rows beside it or their order (spec §20.10).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.engine.distribution import draw, draw_truncated, ranked, scale_logits
from headrace.engine.rng import Purpose, uniform
from headrace.engine.sampling_batch import Cells, Draws, SamplingBatch


@dataclass(frozen=True)
class Sampled:
    """Result of a step. Row i of the log-probability tensors belongs to ``SamplingBatch.logprob_rows[i]``."""

    token_ids: torch.Tensor
    """[S] int64."""
    logprobs: torch.Tensor | None
    """[L] float32, of the drawn tokens: natural logarithm of the raw distribution."""
    top_ids: torch.Tensor | None
    """[L, num_top] int64, likeliest first, lower id first among equals."""
    top_logprobs: torch.Tensor | None
    """[L, num_top] float32."""


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """Draw one token per row of ``logits [S, vocab]`` (left as they are). Bad logits (NaN, all −inf) give some token,
    never an error (L13)."""
    raw = logits.float()
    adjusted = _adjust(raw, batch)
    token_ids = adjusted.argmax(dim=-1)
    if batch.draws is not None:
        token_ids = token_ids.index_copy(0, batch.draws.rows, _draw(adjusted, token_ids, batch.draws))
    if batch.logprob_rows is None:
        return Sampled(token_ids, None, None, None)
    part, drawn = raw[batch.logprob_rows], token_ids[batch.logprob_rows].unsqueeze(-1)
    mass = part.logsumexp(dim=-1, keepdim=True)
    top, top_ids = ranked(part, batch.num_top) if batch.num_top else (part[:, :0], part[:, :0].to(torch.int64))
    return Sampled(token_ids, (part.gather(-1, drawn) - mass).squeeze(-1), top_ids, top - mass)


def _draw(adjusted: torch.Tensor, greedy_ids: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Tokens ``[R]`` of the random rows; a row without a finite distribution falls back to its greedy token."""
    z = scale_logits(adjusted[draws.rows], draws.temperature)
    peak = z.amax(dim=-1)
    broken = ~peak.isfinite()
    z = z.masked_fill(broken.unsqueeze(-1), 0.0)
    u = uniform(draws.seeds, draws.positions, Purpose.FRESH)
    if draws.whole.shape[0] == 0:
        ids = draw_truncated(z, u, draws.top_p, draws.top_k, draws.min_p)
    elif draws.truncated.shape[0] == 0:
        ids = draw(z, u)
    else:
        cut = draws.truncated
        ids = torch.zeros_like(draws.rows)
        ids = ids.index_copy(0, draws.whole, draw(z[draws.whole], u[draws.whole]))
        ids = ids.index_copy(0, cut, draw_truncated(z[cut], u[cut], draws.top_p, draws.top_k, draws.min_p))
    return torch.where(broken, greedy_ids[draws.rows], ids)


def _adjust(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Penalties, biases, suppression, masks, in this order; a new tensor wherever anything changes."""
    if batch.penalties is not None:
        p = batch.penalties
        part = logits[p.rows]
        seen = _dense(p.seen, part) > 0
        generated = _dense(p.generated, part)
        scaled = torch.where(part > 0, part / p.repetition, part * p.repetition)
        part = torch.where(seen, scaled, part)
        part = part - p.presence * (generated > 0) - p.frequency * generated
        logits = logits.index_copy(0, p.rows, part)
    if batch.biases is not None:
        cells = batch.biases
        logits = logits.index_put((cells.rows, cells.columns), cells.values, accumulate=True)
    if batch.suppressed is not None:
        cells = batch.suppressed
        logits = logits.index_put((cells.rows, cells.columns), logits.new_full((), float("-inf")))
    if batch.masks is not None:
        masks = batch.masks
        part = logits[masks.rows].masked_fill(~allowed(masks.bits, logits.shape[-1]), float("-inf"))
        logits = logits.index_copy(0, masks.rows, part)
    return logits


def allowed(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """``[M, vocab]`` bool of masks ``[M, ⌈vocab ÷ 32⌉]`` int32."""
    places = torch.arange(32, device=bits.device, dtype=torch.int32)
    return ((bits.unsqueeze(-1) >> places) & 1).to(torch.bool).flatten(1)[:, :vocab_size]


def _dense(cells: Cells, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like).index_put((cells.rows, cells.columns), cells.values, accumulate=True)
