"""What the rows of a step are sampled with, gathered on the host and laid out on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.engine.masks.matcher import Bits
from headrace.engine.rng import signed
from headrace.engine.sampling_params import SamplingParams
from headrace.kernels.upload import upload, upload_array


@dataclass(frozen=True)
class RowSampling:
    """What one row of logits is sampled with."""

    params: SamplingParams
    seed: int
    """Of the choice (`seeds.choice_seed`), unsigned 64 bits."""
    position: int
    """Absolute position of the token being chosen: N₀ + tokens of the choice so far."""
    prompt_ids: Sequence[int] = ()
    """Read by the repetition penalty only; ids outside the vocabulary are passed over."""
    output_ids: Sequence[int] = ()
    """Tokens of the choice so far; read by the penalties only."""
    suppressed_ids: Sequence[int] = ()
    """Tokens that may not be drawn: EOS and stop ids while fewer than min_tokens are out."""
    mask: Bits | None = None
    """[⌈vocabulary ÷ 32⌉] int32: tokens that the request's language allows; None allows all."""


@dataclass(frozen=True)
class Cells:
    """Sparse entries of a [rows, vocab] matrix."""

    rows: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Masks:
    """Rows whose tokens a language restricts."""

    rows: torch.Tensor
    """[M] int64."""
    bits: torch.Tensor
    """[M, ⌈vocabulary ÷ 32⌉] int32; bit i of word w is token 32·w + i."""


@dataclass(frozen=True)
class Penalties:
    rows: torch.Tensor
    """[P] rows of the batch that have penalties; ``repetition, presence, frequency [P, 1]`` are theirs."""
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    seen: Cells
    """Tokens of prompt or output, rows numbered 0..P−1."""
    generated: Cells
    """Occurrences of tokens in the output."""


@dataclass(frozen=True)
class Draws:
    """Rows that are drawn at random rather than taken greedily; all tensors ``[R]``."""

    rows: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    whole: torch.Tensor
    """Indices 0..R−1 of rows that keep every token."""
    truncated: torch.Tensor
    """Indices 0..R−1 of rows with top_p, top_k or min_p; ``top_p, top_k, min_p`` are theirs."""
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor


@dataclass(frozen=True)
class SamplingBatch:
    """The rows of a step on the device, in the order of the logits."""

    size: int
    penalties: Penalties | None
    biases: Cells | None
    suppressed: Cells | None
    masks: Masks | None
    draws: Draws | None
    logprob_rows: torch.Tensor | None
    """[L] rows that report log-probabilities, None when there are none."""
    num_top: int
    """Largest k asked for by a row."""


def build_batch(rows: Sequence[RowSampling], vocab_size: int, device: torch.device) -> SamplingBatch:
    """Gather the rows of a step; S = len(rows)."""
    penalised = [i for i, row in enumerate(rows) if row.params.penalises]
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    asked = [(i, row.params.logprobs) for i, row in enumerate(rows) if row.params.logprobs is not None]
    biases = [(i, token, bias) for i, row in enumerate(rows) for token, bias in row.params.logit_bias]
    suppressed = [(i, token, 0.0) for i, row in enumerate(rows) for token in row.suppressed_ids]
    return SamplingBatch(
        size=len(rows),
        penalties=_penalties(rows, penalised, vocab_size, device) if penalised else None,
        biases=_cells(biases, vocab_size, device),
        suppressed=_cells(suppressed, vocab_size, device),
        masks=_masks(rows, device),
        draws=_draws(rows, drawn, device) if drawn else None,
        logprob_rows=_ints([i for i, _ in asked], device) if asked else None,
        num_top=min(max((k for _, k in asked), default=0), vocab_size),
    )


def _masks(rows: Sequence[RowSampling], device: torch.device) -> Masks | None:
    found = [(index, row.mask) for index, row in enumerate(rows) if row.mask is not None]
    if not found:
        return None
    return Masks(
        _ints([index for index, _ in found], device), upload_array(np.stack([bits for _, bits in found]), device)
    )


def _penalties(rows: Sequence[RowSampling], penalised: list[int], vocab: int, device: torch.device) -> Penalties:
    params = [rows[i].params for i in penalised]
    outputs = [_counts(rows[i].output_ids, vocab) for i in penalised]
    prompts = [_counts(rows[i].prompt_ids, vocab) for i in penalised]
    return Penalties(
        rows=_ints(penalised, device),
        repetition=_floats([p.repetition_penalty for p in params], device).unsqueeze(-1),
        presence=_floats([p.presence_penalty for p in params], device).unsqueeze(-1),
        frequency=_floats([p.frequency_penalty for p in params], device).unsqueeze(-1),
        seen=_stack(prompts + outputs, list(range(len(penalised))) * 2, device),
        generated=_stack(outputs, list(range(len(penalised))), device),
    )


_Counts = tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]


def _counts(ids: Sequence[int], vocab: int) -> _Counts:
    """Distinct ids inside the vocabulary and how often each occurs."""
    known = np.asarray(ids, dtype=np.int64).reshape(-1)
    return np.unique(known[(known >= 0) & (known < vocab)], return_counts=True)


def _stack(counts: list[_Counts], row_of: list[int], device: torch.device) -> Cells:
    rows = np.repeat(np.asarray(row_of, dtype=np.int64), [len(ids) for ids, _ in counts])
    return Cells(
        upload_array(rows, device),
        upload_array(np.concatenate([ids for ids, _ in counts]), device),
        upload_array(np.concatenate([times for _, times in counts]).astype(np.float32), device),
    )


def _draws(rows: Sequence[RowSampling], drawn: list[int], device: torch.device) -> Draws:
    params = [rows[i].params for i in drawn]
    truncated = [i for i, p in enumerate(params) if p.truncates]
    return Draws(
        rows=_ints(drawn, device),
        temperature=_floats([p.temperature for p in params], device),
        seeds=_ints([signed(rows[i].seed) for i in drawn], device),
        positions=_ints([rows[i].position for i in drawn], device),
        whole=_ints([i for i, p in enumerate(params) if not p.truncates], device),
        truncated=_ints(truncated, device),
        top_p=_floats([params[i].top_p for i in truncated], device),
        top_k=_ints([params[i].top_k for i in truncated], device),
        min_p=_floats([params[i].min_p for i in truncated], device),
    )


def _cells(entries: list[tuple[int, int, float]], vocab: int, device: torch.device) -> Cells | None:
    known = [entry for entry in entries if 0 <= entry[1] < vocab]
    if not known:
        return None
    return Cells(
        _ints([row for row, _, _ in known], device),
        _ints([token for _, token, _ in known], device),
        _floats([value for _, _, value in known], device),
    )


def _ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return upload(values, torch.int64, device)


def _floats(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return upload(values, torch.float32, device)
