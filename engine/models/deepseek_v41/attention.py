"""The attention sublayer: sliding window and selected compressed entries in one softmax (spec §7)."""

from __future__ import annotations

import torch

from headrace.engine.models.deepseek_v41.config import LayerKind, V41Config
from headrace.engine.models.deepseek_v41.indexer import Indexer
from headrace.engine.models.deepseek_v41.rows import RowSet
from headrace.engine.models.deepseek_v41.step import Rotation, Step
from headrace.engine.models.deepseek_v41.weights import AttentionWeights
from headrace.kernels.ops import Operators

_KEY_ELEMENTS = 1 << 24
"""Largest rows × keys × head_dim gathered at once (64 MiB of float32); longer prefills attend in pieces of rows."""


def attention_queries(
    x: torch.Tensor, weights: AttentionWeights, turn: Rotation, ops: Operators, *, heads: int, norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [n, d]`` → the low-rank query [n, q_lora_rank] that the indexer also takes, and rotated heads [n, H, D]."""
    qr = ops.rms_norm(ops.linear(x, weights.wq_a), weights.q_norm, norm_eps)
    return qr, ops.rope(ops.linear(qr, weights.wq_b).view(x.shape[0], heads, -1), turn.cos, turn.sin)


def output_low_rank(attended: torch.Tensor, wo_a: torch.Tensor, ops: Operators) -> torch.Tensor:
    """``[n, H, D], wo_a [groups, rank, H·D/groups] → [n, groups, rank]``: group g takes its own heads only."""
    grouped = attended.reshape(attended.shape[0], wo_a.shape[0], -1)
    return torch.stack([ops.linear(grouped[:, g], wo_a[g]) for g in range(wo_a.shape[0])], dim=1)


class Attention:
    """One layer's attention over pool and slot state."""

    def __init__(
        self, config: V41Config, kind: LayerKind, weights: AttentionWeights, ops: Operators, *, quantised: bool
    ) -> None:
        self._config = config
        self._kind = kind
        self._weights = weights
        self._ops = ops
        self._indexer = (
            Indexer(config, kind, weights.index_queries, ops, quantised=quantised) if weights.index_queries else None
        )

    def forward(self, x: torch.Tensor, rows: RowSet, step: Step) -> torch.Tensor:
        """Normed ``x [n, d]`` → [n, d]. Writes the rows' keys to the layer's ring; a kv source has published before."""
        c, w, ops = self._config, self._weights, self._ops
        turn = step.rotation(rows, compressed=self._kind.ratio > 0)
        qr, q = attention_queries(x, w, turn, ops, heads=c.num_heads, norm_eps=c.norm_eps)
        key = ops.rope(ops.rms_norm(ops.linear(x, w.wkv), w.kv_norm, c.norm_eps), turn.cos, turn.sin)
        window = self._window_keys(key, rows, step)
        if self._indexer is not None:
            step.selection = self._indexer.select(x, qr, rows, step)
        attended = self._attend(q, window, rows, step)
        low = output_low_rank(ops.rope(attended, turn.cos, turn.sin, inverse=True), w.wo_a, ops)
        return ops.linear(low.flatten(1), w.wo_b)

    def _window_keys(self, key: torch.Tensor, rows: RowSet, step: Step) -> torch.Tensor:
        """``[B·(W−1) + n, D]``: ring history of every sequence, then the rows' own keys as stored.

        Then the ring is updated: history is read before the chunk overwrites it (spec §17.4).
        """
        ring = step.views.rings[self._kind.index]
        history = ring.read(rows.history_slots, rows.history_positions, key.dtype)
        stored, values = ring.codec.store(key)
        ring.write(rows.ring_slots, rows.positions, stored)
        return torch.cat((history.flatten(0, 1), values))

    def _attend(self, q: torch.Tensor, window: torch.Tensor, rows: RowSet, step: Step) -> torch.Tensor:
        """``q [n, H, D] → [n, H, D]`` over W window places and index_topk entry places, in that order for every row."""
        c = self._config
        places = c.window + (c.index_topk if self._kind.ratio else 0)
        piece = max(1, _KEY_ELEMENTS // (places * c.head_dim))
        pieces = []
        for first in range(0, rows.count, piece):
            part = slice(first, min(first + piece, rows.count))
            keys, valid = window[rows.window_index[part]], rows.window_valid[part]
            if self._kind.ratio:
                entries, chosen = self._entries(part, rows, step, q.dtype)
                keys, valid = torch.cat((keys, entries), dim=1), torch.cat((valid, chosen), dim=1)
            pieces.append(self._ops.sparse_attention(q[part], keys, valid, self._weights.sink, c.head_dim**-0.5))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _entries(self, part: slice, rows: RowSet, step: Step, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Selected compressed entries [n, index_topk, D] of a slice of rows, and which places hold one."""
        kind = self._kind
        if kind.kv_source is None or step.selection is None:
            raise RuntimeError(f"layer {kind.index}: no index source ran before it")
        chosen = step.selection[part]
        source = step.views.sources[kind.kv_source]
        # An empty place reads entry 0 of its own sequence: finite, and no other request's.
        entry = chosen.clamp_min(0)
        blocks = step.tables[rows.sequences[part].unsqueeze(1), entry // source.section.entries]
        return source.read_main(blocks, entry % source.section.entries, dtype), chosen >= 0
