"""Window visibility, bounded replay, gathered attention and its projections (spec §7, §18.3)."""

from __future__ import annotations

import torch

from bench.golden_harness.case import Case, GoldenFormatError, Tensors
from bench.golden_harness.registry import runner
from bench.golden_harness.scaffold import Chunk, chunk_batch
from headrace.engine.models.deepseek_v41.attention import attention_queries, output_low_rank
from headrace.engine.models.deepseek_v41.config import RopeConfig
from headrace.engine.models.deepseek_v41.rows import RowSet, plan_rows
from headrace.engine.models.deepseek_v41.step import Rotation, frequencies
from headrace.engine.models.deepseek_v41.weights import AttentionWeights
from headrace.kernels.ops import Operators
from headrace.kernels.reference.linear import widen
from headrace.kernels.reference.rope import rope_table
from headrace.kernels.reference.sparse_attention import sparse_attention
from headrace.kernels.select import select
from headrace.kernels.weights import Fp8Weight
from headrace.kvcache.layout import KVLayout, v41_layout

NORM_EPS = 1e-20
ROPE_BASE = 10000.0
"""Published rotary base of window layers, which the module cases take."""


@runner("attention")
def run(case: Case) -> Tensors:
    name = case.short_name
    if name.startswith("window_prefill"):
        return {"idx": _visible(_window_rows(case, Chunk(0, case.integer("length"))), 0)[None]}
    if name.startswith("window_decode"):
        position, window = case.integer("position"), case.integer("window")
        keys = _visible(_window_rows(case, Chunk(position, 1)), position)[None]
        return {"idx": torch.where(keys >= 0, keys % window, -1)}
    if name.startswith("bounded_replay_plan"):
        return {"rows": _replay_plan(case.expected("rows"))}
    if name.startswith("sparse"):
        return _sparse(case)
    ops = select(torch.device("cpu")).ops
    if name.startswith("output_lora"):
        return _project(case, case.input("o")[0], _wo_a(case), ops)
    if name.startswith("module"):
        return _module(case, ops)
    raise GoldenFormatError(f"unknown attention case {case.name}")


def _layout(window: int) -> KVLayout:
    return v41_layout(
        n_layers=2,
        n_draft_layers=0,
        compress_ratios=(2, 1),
        kv_source_layers=(0, 1),
        head_dim=32,
        index_head_dim=32,
        window=window,
        block_tokens=32,
    )


def _window_rows(case: Case, chunk: Chunk) -> RowSet:
    layout = _layout(case.integer("window"))
    return plan_rows(chunk_batch(layout, [chunk]), layout).all


def _visible(rows: RowSet, start: int) -> torch.Tensor:
    """Positions [n, W] that a one-sequence row set sees, −1 = none: its keys are the history, then its own rows."""
    history = rows.history_positions.shape[1]
    return torch.where(rows.window_valid, rows.window_index - history + start, -1)


def _replay_plan(stored: torch.Tensor) -> torch.Tensor:
    """The stored table, recomputed for each of its rows from the chunk that the row names.

    The stored rule keeps a placeholder row of a chunk that lies wholly before the kept range, sees nothing and writes
    nothing. We run no row there (spec/protocol.md); its line is written from the empty row set.
    """
    lines = []
    for case, total, keep, window, start, length, _, position, *_ in stored.tolist():
        layout = _layout(window)
        chunk = Chunk(start, length, keep_from=total - keep)
        rows = plan_rows(chunk_batch(layout, [chunk]), layout).kept
        if rows.count == 0:
            last = start + length - 1
            lines.append([case, total, keep, window, start, length, length - 1, last, last + 1, 0, 0])
            continue
        first = int(rows.positions[0])
        row = rows.positions.tolist().index(position)
        keys = [p for p in _visible(rows, first)[row].tolist() if p >= 0]
        # Within one chunk the ring keeps the last ρ keys; the table asks which rows may write at all.
        lines.append([case, total, keep, window, start, length, first - start, position, keys[0], len(keys), 1])
    return torch.tensor(lines)


def _sparse(case: Case) -> Tensors:
    q, kv, idx = case.input("q"), case.input("kv"), case.input("idx").long()
    sink, scale = case.input("sink"), case.number("scale")

    def attend(dtype: torch.dtype) -> torch.Tensor:
        rows = [
            sparse_attention(q[b].to(dtype), kv[b].to(dtype)[idx[b].clamp_min(0)], idx[b] >= 0, sink, scale)
            for b in range(q.shape[0])
        ]
        return torch.stack(rows)

    return {"o_exact": attend(torch.float32), "o_ref": attend(q.dtype)}


def _fp8(case: Case, name: str) -> Fp8Weight:
    return Fp8Weight(case.weight(name), case.weight(f"{name}_scale"))


def _wo_a(case: Case) -> torch.Tensor:
    plain = widen(_fp8(case, "wo_a")) if "wo_a_scale" in case.weights else case.weight("wo_a").float()
    return plain.view(case.integer("groups"), case.integer("rank"), -1)


def _project(case: Case, attended: torch.Tensor, wo_a: torch.Tensor, ops: Operators) -> dict[str, torch.Tensor]:
    low = output_low_rank(attended, wo_a.to(attended.dtype), ops)
    return {"lora_a": low[None], "y": ops.linear(low.flatten(1), _fp8(case, "wo_b"))[None]}


def _module(case: Case, ops: Operators) -> Tensors:
    x, kv, idx = case.input("x")[0], case.input("kv")[0], case.input("idx")[0].long()
    wo_a = _wo_a(case)
    weights = AttentionWeights(
        wq_a=_fp8(case, "wq_a"),
        q_norm=case.weight("q_norm"),
        wq_b=_fp8(case, "wq_b"),
        wkv=torch.empty(0),
        kv_norm=torch.empty(0),
        sink=case.weight("sink"),
        wo_a=wo_a,
        wo_b=_fp8(case, "wo_b"),
        compressor=None,
        index_keys=None,
        index_queries=None,
    )
    rope = RopeConfig(ROPE_BASE, case.integer("rope_dim"), 0, 1.0, 0.0, 0.0)
    turn = Rotation(*rope_table(torch.arange(x.shape[0]), frequencies(rope, torch.device("cpu"))))
    _, q = attention_queries(x, weights, turn, ops, heads=case.integer("heads"), norm_eps=NORM_EPS)
    attended = sparse_attention(q, kv[idx.clamp_min(0)], idx >= 0, weights.sink, q.shape[-1] ** -0.5)
    restored = ops.rope(attended, turn.cos, turn.sin, inverse=True)
    return {"o_before_inverse": attended[None], **_project(case, restored, wo_a, ops)}
