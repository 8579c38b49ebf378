"""Producing compressed entries and their index keys; kv sources only (spec §8, §9)."""

from __future__ import annotations

import torch

from headrace.engine.models.deepseek_v41.step import Rotation, Step
from headrace.engine.models.deepseek_v41.weights import CompressorWeights, IndexKeyWeights
from headrace.kernels.ops import Operators


class Compressor:
    """Turns a kv source's attention input into pool entries, for every row of the step."""

    def __init__(
        self,
        layer: int,
        ratio: int,
        norm_eps: float,
        weights: CompressorWeights,
        key_weights: IndexKeyWeights,
        ops: Operators,
    ) -> None:
        self._layer = layer
        self._ratio = ratio
        self._eps = norm_eps
        self._weights = weights
        self._key_weights = key_weights
        self._ops = ops

    def publish(self, x: torch.Tensor, step: Step) -> None:
        """``x [T, d]``: write the entries that the rows complete, and keep the state of open groups.

        Rows that complete no group write to the reserved pool row. Latent and index key are rotated to the group's
        first position.
        """
        chunk, positions = step.rows.chunk, step.rows.all.positions
        source = step.views.sources[self._layer]
        latent = self.latent(x, step)
        turn = step.entry_rotation(self._ratio)
        closes = (positions + 1) % self._ratio == 0
        source.write(
            torch.where(closes, chunk.blocks, 0),
            positions // self._ratio % source.section.entries,
            self._ops.rope(latent, turn.cos, turn.sin),
            self.index_keys(latent, turn),
        )

    def index_keys(self, latent: torch.Tensor, turn: Rotation) -> torch.Tensor:
        """``latent [n, D]`` before its rotation → rotated, not yet rounded index keys [n, I]."""
        keys = self._ops.rms_norm(self._ops.linear(latent, self._key_weights.wk), self._key_weights.norm, self._eps)
        return self._ops.rope(keys, turn.cos, turn.sin)

    def latent(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Normed latent [T, D] of the group that each row belongs to, complete only where the row closes it."""
        w = self._weights
        if w.wgate is None:
            return self._ops.rms_norm(self._ops.linear(x, w.wkv), w.norm, self._eps)
        gates_values = torch.stack((self._ops.linear_fp32(x, w.wgate), self._ops.linear_fp32(x, w.wkv)), dim=1)
        members = self._members(gates_values, step)
        pooled = self._ops.pool_group(members[:, :, 0], members[:, :, 1])
        return self._ops.rms_norm(pooled.to(x.dtype), w.norm, self._eps)

    def _members(self, gates_values: torch.Tensor, step: Step) -> torch.Tensor:
        """``[T, 2, D] → [T, r, 2, D]``: the r tokens ending at each row, older ones from the state; then update it.

        The state is read before the chunk overwrites it.
        """
        state = step.views.states[self._layer]
        chunk, positions = step.rows.chunk, step.rows.all.positions
        back = torch.arange(1 - self._ratio, 1, device=positions.device)
        wanted = positions.unsqueeze(1) + back
        row = torch.arange(positions.shape[0], device=positions.device).unsqueeze(1) + back
        inside = wanted >= chunk.starts.unsqueeze(1)
        fresh = gates_values[row.clamp_min(0)]
        members = torch.where(inside[..., None, None], fresh, state.read(chunk.slots, wanted))
        kept = positions >= chunk.ends - state.entries.shape[1]
        state.write(torch.where(kept, chunk.slots, 0), positions, gates_values)
        return members
