"""Which rows a layer runs on, and where each row's keys lie: computed once per step, shared by all layers.

A step has two row sets: producers run every row, consumers run the rows that bounded replay keeps (spec §18.3). Every
index below is a device tensor. When all sequences bring one row (decode) they are derived from the batch's own device
tensors alone, as a captured graph needs; otherwise from the host's starts and lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from headrace.engine.batch import StepBatch
from headrace.kernels.upload import upload
from headrace.kvcache.layout import KVLayout


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences with equally many rows: one rectangle of rows over one rectangle of blocks."""

    rows: torch.Tensor
    """[G, m] indices into the row set."""
    tables: torch.Tensor
    """[G, blocks] pool rows."""


@dataclass(frozen=True)
class RowSet:
    """n rows of a step that run together, from B sequences in order."""

    picked: torch.Tensor | None
    """[n] indices into the step's rows; None when the set is all of them."""
    positions: torch.Tensor
    """[n]."""
    sequences: torch.Tensor
    """[n] row → sequence of the step."""
    image_mask: torch.Tensor | None
    """[n], None when the step has no images."""
    history_slots: torch.Tensor
    """[B] slot of each sequence."""
    history_positions: torch.Tensor
    """[B, W−1] positions before each sequence's first row; negative before position 0."""
    window_index: torch.Tensor
    """[n, W] into [B·(W−1) history keys, n keys of the rows], oldest first; the row itself where not visible."""
    window_valid: torch.Tensor
    """[n, W] bool."""
    ring_slots: torch.Tensor
    """[n] slot to write the row's key to; the reserved slot 0 for rows whose key no later row can see."""
    groups: tuple[SequenceGroup, ...]

    @property
    def count(self) -> int:
        return self.positions.shape[0]

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """The set's rows of a tensor over the step's rows."""
        return value if self.picked is None else value[self.picked]


@dataclass(frozen=True)
class ChunkRows:
    """Per row of the whole step: its place in its sequence's chunk and in the pool."""

    starts: torch.Tensor
    """[T] first position of the row's chunk."""
    ends: torch.Tensor
    """[T] position after the chunk's last."""
    slots: torch.Tensor
    """[T]."""
    blocks: torch.Tensor
    """[T] pool row that holds the position."""


@dataclass(frozen=True)
class StepRows:
    """The row sets of one step."""

    all: RowSet
    kept: RowSet
    """The same object as ``all`` when every row is kept."""
    chunk: ChunkRows


def plan_rows(batch: StepBatch, layout: KVLayout) -> StepRows:
    """Row sets of a step. With batch.mask_replay all rows run the consumers, under bounded replay's visibility."""
    window = layout.window
    single = all(length == 1 for length in batch.lengths)
    device = batch.positions.device
    starts = batch.positions if single else upload(batch.starts, torch.int64, device)[batch.sequence_of_row]
    ends = starts + 1 if single else _per_row(batch.lengths, batch) + starts
    blocks = batch.block_tables[batch.sequence_of_row, batch.positions // layout.block_tokens]
    chunk = ChunkRows(starts=starts, ends=ends, slots=batch.slots[batch.sequence_of_row], blocks=blocks)
    everything = tuple(range(batch.num_sequences))
    whole = _row_set(batch, layout, everything, batch.starts, batch.lengths, None, None)
    bound = tuple(start - window + 1 < keep for start, keep in zip(batch.starts, batch.keep_from, strict=True))
    if not any(keep > 0 and cut for keep, cut in zip(batch.keep_from, bound, strict=True)):
        return StepRows(whole, whole, chunk)
    if batch.mask_replay:
        kept = _row_set(batch, layout, everything, batch.starts, batch.lengths, None, batch.keep_from)
        return StepRows(whole, kept, chunk)
    firsts = [max(start, min(keep, start + n)) for start, n, keep in _chunks(batch)]
    lengths = [start + n - first for (start, n, _), first in zip(_chunks(batch), firsts, strict=True)]
    members = tuple(b for b in everything if lengths[b] > 0)
    picked: list[int] = []
    row = 0
    for b in everything:
        row += batch.lengths[b]
        picked.extend(range(row - lengths[b], row))
    kept = _row_set(
        batch,
        layout,
        members,
        tuple(firsts[b] for b in members),
        tuple(lengths[b] for b in members),
        None if len(picked) == batch.num_tokens else upload(picked, torch.int64, device),
        tuple(batch.keep_from[b] for b in members),
    )
    return StepRows(whole, kept, chunk)


def _chunks(batch: StepBatch) -> list[tuple[int, int, int]]:
    return list(zip(batch.starts, batch.lengths, batch.keep_from, strict=True))


def _per_row(values: tuple[int, ...], batch: StepBatch) -> torch.Tensor:
    return upload(values, torch.int64, batch.positions.device)[batch.sequence_of_row]


def _row_set(
    batch: StepBatch,
    layout: KVLayout,
    members: tuple[int, ...],
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    picked: torch.Tensor | None,
    keep_from: tuple[int, ...] | None,
) -> RowSet:
    """Rows of the sequences ``members``: lengths[i] rows from position starts[i] on."""
    device, window = batch.positions.device, layout.window

    def ints(values: Sequence[int]) -> torch.Tensor:
        return upload(values, torch.int64, device)

    def take(value: torch.Tensor) -> torch.Tensor:
        return value if picked is None else value[picked]

    positions, sequences = take(batch.positions), take(batch.sequence_of_row)
    count, members_count = sum(lengths), len(members)
    whole = members_count == batch.num_sequences
    slots = batch.slots if whole else batch.slots[ints(members)]
    single = picked is None and all(n == 1 for n in lengths)
    if single:
        ordinal = first_row = sequences
        first_position, last_position = positions, positions
        member_starts = positions
    else:
        ordinal = torch.repeat_interleave(ints(lengths), output_size=count)
        offsets = [sum(lengths[:i]) for i in range(members_count)]
        first_row, member_starts = ints(offsets)[ordinal], ints(starts)
        first_position = member_starts[ordinal]
        last_position = first_position + ints(lengths)[ordinal] - 1
    lowest = torch.zeros_like(positions) if keep_from is None else ints([max(k, 0) for k in keep_from])[ordinal]

    keys = positions.unsqueeze(1) + torch.arange(1 - window, 1, device=device)
    ago = keys - first_position.unsqueeze(1)
    inside = members_count * (window - 1) + first_row.unsqueeze(1) + ago
    before = ordinal.unsqueeze(1) * (window - 1) + ago + window - 1
    valid = keys >= lowest.unsqueeze(1)
    # What is not visible points at the row itself: no other sequence's numbers, broken ones included, reach it (L13).
    own = members_count * (window - 1) + torch.arange(count, device=device).unsqueeze(1)
    lasting = (positions > last_position - layout.ring_tokens) & (positions >= lowest)
    return RowSet(
        picked=picked,
        positions=positions,
        sequences=sequences,
        image_mask=None if batch.image_embeddings is None else take(batch.image_mask),
        history_slots=slots,
        history_positions=member_starts.unsqueeze(1) + torch.arange(1 - window, 0, device=device),
        window_index=torch.where(valid, torch.where(ago >= 0, inside, before), own),
        window_valid=valid,
        ring_slots=torch.where(lasting, slots[ordinal], 0),
        groups=(SequenceGroup(sequences.unsqueeze(1), batch.block_tables),)
        if single
        else _groups(batch, layout, members, starts, lengths, device),
    )


def _groups(
    batch: StepBatch,
    layout: KVLayout,
    members: tuple[int, ...],
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    device: torch.device,
) -> tuple[SequenceGroup, ...]:
    """Sequences by their number of rows, over as many blocks as the longest of a group has."""
    offsets = [sum(lengths[:i]) for i in range(len(members))]
    groups = []
    for length, same in groupby(sorted(range(len(members)), key=lambda i: lengths[i]), key=lambda i: lengths[i]):
        indices = list(same)
        blocks = max(layout.blocks_for(starts[i] + length) for i in indices)
        first = upload([offsets[i] for i in indices], torch.int64, device).unsqueeze(1)
        tables = batch.block_tables[upload([members[i] for i in indices], torch.int64, device), :blocks]
        groups.append(SequenceGroup(first + torch.arange(length, device=device), tables))
    return tuple(groups)
