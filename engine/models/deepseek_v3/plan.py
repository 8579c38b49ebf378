"""What all layers of one forward pass share: where each new token's latent goes, and who attends to what."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.engine.batch import StepBatch
from headrace.kernels.upload import upload


@dataclass(frozen=True)
class QueryGroup:
    """Sequences that are computed as one attention call: G sequences of n new tokens each.

    Sequences of one token (decode) form one group; every longer chunk is a group of its own.
    """

    rows: slice | torch.Tensor
    """The group's G · n rows of the batch, sequences in order."""
    tables: torch.Tensor
    """[G, blocks] pool rows that hold positions 0 … the group's longest end."""
    positions: torch.Tensor
    """[G, n] int64 positions of the queries."""
    keys: int
    """Longest end of the group: keys at positions ≥ it are seen by nobody."""

    @property
    def sequences(self) -> int:
        return self.positions.shape[0]

    @property
    def tokens(self) -> int:
        return self.positions.shape[1]


@dataclass(frozen=True)
class StepPlan:
    """Made once per step; T rows."""

    pool_rows: torch.Tensor
    """[T] pool row of each new token."""
    offsets: torch.Tensor
    """[T] its place in that row."""
    cos: torch.Tensor
    """[T, rope / 2] float32, attention factor included."""
    sin: torch.Tensor
    groups: tuple[QueryGroup, ...]


def rope_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, attention_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, rope / 2] float32 of ``positions`` [T], attention factor included."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def plan_step(batch: StepBatch, block_tokens: int, frequencies: torch.Tensor, attention_factor: float) -> StepPlan:
    """The plan of a batch. ``frequencies`` [rope / 2] float32 on the model's device."""
    blocks = torch.div(batch.positions, block_tokens, rounding_mode="floor")
    cos, sin = rope_tables(batch.positions, frequencies, attention_factor)
    return StepPlan(
        pool_rows=batch.block_tables[batch.sequence_of_row, blocks],
        offsets=batch.positions - blocks * block_tokens,
        cos=cos,
        sin=sin,
        groups=tuple(_groups(batch, block_tokens)),
    )


def _groups(batch: StepBatch, block_tokens: int) -> list[QueryGroup]:
    groups: list[QueryGroup] = []
    firsts: list[int] = []
    first = 0
    for length in batch.lengths:
        firsts.append(first)
        first += length
    single = [index for index, length in enumerate(batch.lengths) if length == 1]
    if single:
        # A step of decode rows only (the common one) needs no index: its rows are the whole batch.
        whole = len(single) == batch.num_sequences
        rows: slice | torch.Tensor = slice(0, first)
        chosen = batch.block_tables
        if not whole:
            rows = upload([firsts[index] for index in single], torch.int64, batch.positions.device)
            chosen = batch.block_tables[upload(single, torch.int64, batch.positions.device)]
        keys = max(batch.starts[index] for index in single) + 1
        tables = chosen[:, : -(-keys // block_tokens)]
        groups.append(QueryGroup(rows, tables, batch.positions[rows].view(-1, 1), keys))
    for index, length in enumerate(batch.lengths):
        if length > 1:
            rows = slice(firsts[index], firsts[index] + length)
            keys = batch.starts[index] + length
            tables = batch.block_tables[index : index + 1, : -(-keys // block_tokens)]
            groups.append(QueryGroup(rows, tables, batch.positions[rows].view(1, -1), keys))
    return groups
