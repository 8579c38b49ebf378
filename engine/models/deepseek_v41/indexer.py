"""Scoring and choosing compressed entries; index sources only (spec §9)."""

from __future__ import annotations

import torch

from headrace.engine.models.deepseek_v41.config import LayerKind, V41Config
from headrace.engine.models.deepseek_v41.rows import RowSet
from headrace.engine.models.deepseek_v41.step import Rotation, Step
from headrace.engine.models.deepseek_v41.weights import IndexQueryWeights
from headrace.kernels.ops import Operators
from headrace.kernels.reference.selection import (
    entries_of_blocks,
    visible_mask,
)

_SCORE_ELEMENTS = 1 << 24
"""Largest rows × heads × entries held at once (64 MiB of float32); longer prefills are scored in pieces of rows."""


def index_queries(
    x: torch.Tensor,
    qr: torch.Tensor,
    weights: IndexQueryWeights,
    turn: Rotation,
    ops: Operators,
    *,
    heads: int,
    quantised: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries [n, heads, I], rounded as the cached keys are, and head weights [n, heads] float32."""
    q = ops.rope(ops.linear(qr, weights.wq_b).view(x.shape[0], heads, -1), turn.cos, turn.sin)
    if quantised:
        q = ops.round_trip_fp4_index(q)
    return q, ops.linear(x, weights.weights_proj).float() * (q.shape[-1] ** -0.5 * heads**-0.5)


class Indexer:
    """Selection of one index source, with the keys of its own kv source (the released decode code used another's)."""

    def __init__(
        self, config: V41Config, kind: LayerKind, weights: IndexQueryWeights, ops: Operators, *, quantised: bool
    ) -> None:
        if kind.kv_source is None:
            raise ValueError(f"layer {kind.index} has no kv source")
        self._config = config
        self._kind = kind
        self._source = kind.kv_source
        self._weights = weights
        self._ops = ops
        self._quantised = quantised

    def select(self, x: torch.Tensor, qr: torch.Tensor, rows: RowSet, step: Step) -> torch.Tensor:
        """``x [n, d], qr [n, q_lora_rank] → [n, index_topk]`` entries in ascending order, −1 = none."""
        turn = step.rotation(rows, compressed=True)
        queries, weights = index_queries(
            x, qr, self._weights, turn, self._ops, heads=self._config.index_heads, quantised=self._quantised
        )
        visible = (rows.positions + 1) // self._kind.ratio
        out = torch.full((rows.count, self._config.index_topk), -1, dtype=torch.int64, device=x.device)
        made: list[torch.Tensor] = []
        for ordinal, group in enumerate(rows.groups):
            flat = group.rows.flatten()
            keys = step.views.sources[self._source].read_keys(group.tables, x.dtype)
            scores = self._score(queries[group.rows], keys, weights[group.rows]).flatten(0, 1)
            scores = scores.masked_fill(~visible_mask(visible[flat], scores.shape[1]), float("-inf"))
            if self._kind.makes_candidates:
                made.append(self._candidates(scores, visible[flat]))
                step.record("candidates", self._kind.index, rows, made[-1])
            if self._kind.searches_candidates and step.candidates is not None:
                allowed = entries_of_blocks(
                    step.candidates[ordinal], self._config.candidate_block_size, scores.shape[1]
                )
                scores = scores.masked_fill(~allowed, float("-inf"))
            step.record("scores", self._kind.index, rows, scores)
            out[flat] = self._ops.select_entries(scores, self._config.index_topk)
        if self._kind.makes_candidates:
            step.candidates = tuple(made)
        step.record("selection", self._kind.index, rows, out)
        return out

    def _score(self, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``[G, m, heads, I], [G, J, I], [G, m, heads] → [G, m, J]``, in pieces of m."""
        groups, rows, heads, _ = queries.shape
        piece = max(1, _SCORE_ELEMENTS // (groups * heads * keys.shape[1]))
        if piece >= rows:
            return self._ops.index_scores(queries, keys, weights)
        slices = [slice(first, first + piece) for first in range(0, rows, piece)]
        return torch.cat([self._ops.index_scores(queries[:, s], keys, weights[:, s]) for s in slices], dim=1)

    def _candidates(self, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        c = self._config
        return self._ops.candidate_blocks(scores, visible, c.candidate_block_size, c.candidate_topk_blocks)
