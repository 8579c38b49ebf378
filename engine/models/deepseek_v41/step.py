"""What the layers of one forward pass share: row sets, cache views, rotary tables, the last selection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.engine.models.deepseek_v41.cache import CacheViews
from headrace.engine.models.deepseek_v41.config import RopeConfig
from headrace.engine.models.deepseek_v41.probe import Probe
from headrace.engine.models.deepseek_v41.rows import RowSet, StepRows
from headrace.kernels.reference.rope import Yarn, rope_frequencies, rope_table


@dataclass(frozen=True)
class Rotation:
    """cos and sin [n, rd/2] of a row set's positions."""

    cos: torch.Tensor
    sin: torch.Tensor


def frequencies(rope: RopeConfig, device: torch.device) -> torch.Tensor:
    """Inverse frequencies [rd/2] float32 of one table (spec §5)."""
    yarn = Yarn(rope.factor, rope.original_seq_len, rope.beta_fast, rope.beta_slow)
    return rope_frequencies(rope.dim, rope.base, yarn).to(device)


class Step:
    """State of one forward pass. kv sources publish into the pool before their consumers read, because layers run in
    order; the selection and the candidates therefore need one place each (spec §9)."""

    def __init__(
        self,
        rows: StepRows,
        views: CacheViews,
        tables: torch.Tensor,
        plain_frequencies: torch.Tensor,
        compressed_frequencies: torch.Tensor,
        probe: Probe | None,
    ) -> None:
        self.rows = rows
        self.views = views
        self.tables = tables
        """[B, blocks] pool rows."""
        self.probe = probe
        self.selection: torch.Tensor | None = None
        """[n, index_topk] entries chosen by the last index source, −1 = none."""
        self.candidates: tuple[torch.Tensor, ...] | None = None
        """Per group of sequences: blocks [rows, ⌈J/B⌉] that later index sources may search."""
        self._plain = plain_frequencies
        self._compressed = compressed_frequencies
        self._rotations: dict[tuple[bool, bool, int], Rotation] = {}

    def rotation(self, rows: RowSet, *, compressed: bool) -> Rotation:
        """Rotary table at the rows' positions: the compressed one for layers with r > 0 (spec §5)."""
        return self._rotation(rows, compressed, 1)

    def entry_rotation(self, ratio: int) -> Rotation:
        """Rotary table of the entries that the step's rows belong to: entry j stands at position j·r (spec §5)."""
        return self._rotation(self.rows.all, True, ratio)

    def _rotation(self, rows: RowSet, compressed: bool, ratio: int) -> Rotation:
        key = (rows is self.rows.all, compressed, ratio)
        if key not in self._rotations:
            positions = rows.positions if ratio == 1 else rows.positions // ratio * ratio
            cos, sin = rope_table(positions, self._compressed if compressed else self._plain)
            self._rotations[key] = Rotation(cos, sin)
        return self._rotations[key]

    def record(self, name: str, layer: int, rows: RowSet, value: torch.Tensor) -> None:
        if self.probe is not None:
            self.probe.record(name, layer, rows, value)

    def replace(self, name: str, layer: int, rows: RowSet, value: torch.Tensor) -> torch.Tensor:
        return value if self.probe is None else self.probe.replace(name, layer, rows, value)
