"""Driving a model the way the engine does: pool rows, block tables, slots and ragged steps, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any

import torch

from headrace.engine.batch import IMAGE_TOKEN, PAD_TOKEN, StepBatch
from headrace.engine.model import Model
from headrace.kvcache.pool import KVPool

_numbers = count()


@dataclass(eq=False)
class ServedSequence:
    """One sequence in a pool: what is known of it, and how many positions are computed."""

    ids: list[int]
    rows: list[int]
    slot: int
    keep_from: int = 0
    computed: int = 0
    image: list[bool] = field(default_factory=list)
    """Image positions; shorter than ids where the rest is text."""
    embeddings: torch.Tensor | None = None
    """[image positions, d]."""
    owner: str = field(default_factory=lambda: f"sequence {next(_numbers)}")

    def is_image(self, position: int) -> bool:
        return position < len(self.image) and self.image[position]


def admit(
    pool: KVPool,
    ids: Sequence[int],
    *,
    capacity: int,
    keep_from: int = 0,
    image: Sequence[bool] = (),
    embeddings: torch.Tensor | None = None,
) -> ServedSequence:
    """Rows for ``capacity`` positions and a slot of ``pool``."""
    sequence = ServedSequence(list(ids), [], 0, keep_from, 0, list(image), embeddings)
    sequence.rows = list(pool.allocate_rows(pool.layout.blocks_for(capacity), sequence.owner))
    sequence.slot = pool.allocate_slot(sequence.owner)
    return sequence


def hand_over(sequence: ServedSequence, source: KVPool, target: KVPool) -> ServedSequence:
    """The sequence in another pool: its rows and its slot copied, nothing computed."""
    moved = admit(
        target,
        sequence.ids,
        capacity=len(sequence.rows) * source.layout.block_tokens,
        keep_from=sequence.keep_from,
        image=sequence.image,
        embeddings=sequence.embeddings,
    )
    moved.computed = sequence.computed
    target.rows[moved.rows] = source.rows[sequence.rows]
    target.slots[moved.slot] = source.slots[sequence.slot]
    return moved


def make_batch(
    model: Model, work: Sequence[tuple[ServedSequence, int]], *, every_row: bool = False, mask_replay: bool = False
) -> StepBatch:
    """The next ``n`` positions of each sequence as one step; logits of the last kept row of each, or of every row that
    runs the whole model."""
    lengths = tuple(n for _, n in work)
    starts = tuple(s.computed for s, _ in work)
    spans = [range(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    flat = [(b, s, p) for b, ((s, _), span) in enumerate(zip(work, spans, strict=True)) for p in span]
    wanted: list[int] = []
    row = 0
    for (s, n), span in zip(work, spans, strict=True):
        kept = [row + i for i, p in enumerate(span) if p >= s.keep_from]
        wanted += kept if every_row else kept[-1:]
        row += n
    parts = [_embeddings(s, span) for (s, _), span in zip(work, spans, strict=True)]
    images = [part for part in parts if part is not None]
    width = max(len(s.rows) for s, _ in work)
    return StepBatch(
        token_ids=torch.tensor([s.ids[p] for _, s, p in flat]),
        positions=torch.tensor([p for _, _, p in flat]),
        sequence_of_row=torch.tensor([b for b, _, _ in flat]),
        starts=starts,
        lengths=lengths,
        block_tables=torch.tensor([s.rows + [0] * (width - len(s.rows)) for s, _ in work]),
        slots=torch.tensor([s.slot for s, _ in work]),
        keep_from=tuple(s.keep_from for s, _ in work),
        lookback=torch.tensor([_lookback(s, model.lookback_tokens) for s, _ in work], dtype=torch.int64).view(
            len(work), model.lookback_tokens
        ),
        image_mask=torch.tensor([s.is_image(p) for _, s, p in flat]),
        image_embeddings=torch.cat(images) if images else None,
        logit_rows=torch.tensor(wanted, dtype=torch.int64),
        mask_replay=mask_replay,
    )


def on_device(batch: StepBatch, device: torch.device) -> StepBatch:
    """The batch with all its tensors on a device."""
    tensors: dict[str, Any] = {
        field.name: value.to(device)
        for field in fields(StepBatch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return replace(batch, **tensors)


def run_step(
    model: Model,
    pool: KVPool,
    work: Sequence[tuple[ServedSequence, int]],
    *,
    every_row: bool = False,
    mask_replay: bool = False,
) -> torch.Tensor:
    """Compute the next ``n`` positions of each sequence in one step → logits of `make_batch`'s rows."""
    batch = make_batch(model, work, every_row=every_row, mask_replay=mask_replay)
    logits = model.forward(on_device(batch, pool.device), pool)
    for sequence, n in work:
        sequence.computed += n
    return logits


def prefill(
    model: Model,
    pool: KVPool,
    sequence: ServedSequence,
    chunk: int,
    *,
    every_row: bool = False,
    mask_replay: bool = False,
) -> torch.Tensor:
    """Compute all of the sequence's ids in chunks → logits of the last row, or of every kept row."""
    parts = []
    while sequence.computed < len(sequence.ids):
        n = min(chunk, len(sequence.ids) - sequence.computed)
        parts.append(run_step(model, pool, [(sequence, n)], every_row=every_row, mask_replay=mask_replay))
    return torch.cat(parts) if every_row else parts[-1]


def _lookback(sequence: ServedSequence, length: int) -> list[int]:
    found = []
    for p in range(sequence.computed - length, sequence.computed):
        found.append(PAD_TOKEN if p < 0 else IMAGE_TOKEN if sequence.is_image(p) else sequence.ids[p])
    return found


def _embeddings(sequence: ServedSequence, span: range) -> torch.Tensor | None:
    before = sum(sequence.image[: span.start])
    inside = sum(sequence.is_image(p) for p in span)
    if sequence.embeddings is None or not inside:
        return None
    return sequence.embeddings[before : before + inside]
