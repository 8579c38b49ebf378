"""A probe that keeps what a forward pass computed, by position, and can force what layers are fed with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.engine.models.deepseek_v41.probe import Probe
from headrace.engine.models.deepseek_v41.rows import RowSet


class Recorder(Probe):
    """For steps of one sequence. The last computation of a position counts."""

    def __init__(self, forced: Mapping[tuple[str, int], torch.Tensor] | None = None) -> None:
        """``forced``: (name, layer) → rows by absolute position that replace the layer's own input."""
        self._forced = dict(forced or {})
        self._kept: dict[tuple[str, int], dict[int, torch.Tensor]] = {}

    def record(self, name: str, layer: int, rows: RowSet, value: torch.Tensor) -> None:
        kept = self._kept.setdefault((name, layer), {})
        for position, row in zip(rows.positions.tolist(), value, strict=True):
            kept[position] = row

    def replace(self, name: str, layer: int, rows: RowSet, value: torch.Tensor) -> torch.Tensor:
        forced = self._forced.get((name, layer))
        return value if forced is None else forced.to(value.device)[rows.positions].to(value.dtype)

    def rows(self, name: str, layer: int, positions: list[int], width: int | None = None) -> torch.Tensor:
        """Recorded rows of ``positions``; ``width`` cuts or fills (−inf, false) rows that grow with the sequence."""
        kept = self._kept[name, layer]
        found = [kept[p] for p in positions]
        if width is None:
            return torch.stack(found)
        fill = float("-inf") if found[0].dtype.is_floating_point else 0
        out = torch.full((len(found), width), fill, dtype=found[0].dtype)
        for line, row in zip(out, found, strict=True):
            line[: row.shape[0]] = row[:width]
        return out
