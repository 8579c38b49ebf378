"""The compressor of kv sources (spec §8), run over pool rows and slot state, one chunk and token by token."""

from __future__ import annotations

import torch

from bench.golden_harness.case import Case, Tensors
from bench.golden_harness.registry import runner
from bench.golden_harness.scaffold import Chunk, chunk_step
from headrace.engine.models.deepseek_v41.compressor import Compressor
from headrace.engine.models.deepseek_v41.weights import CompressorWeights, IndexKeyWeights
from headrace.kernels.select import select
from headrace.kvcache.layout import KVLayout, v41_layout
from headrace.kvcache.pool import KVPool

NORM_EPS = 1e-20
INDEX_DIM = 32
UNFILLED = -1e30


@runner("compressor")
def run(case: Case) -> Tensors:
    x, ratio = case.input("x"), case.integer("ratio")
    compressor = _compressor(case, x.dtype)
    layout = _layout(case)
    if "n0" not in case.config:
        return _prefill(compressor, layout, x, ratio)
    return _steps(case, compressor, layout, x[0], ratio)


def _layout(case: Case) -> KVLayout:
    ratio = case.integer("ratio")
    return v41_layout(
        n_layers=1,
        n_draft_layers=0,
        compress_ratios=(ratio,),
        kv_source_layers=(0,),
        head_dim=case.weight("wkv").shape[0],
        index_head_dim=INDEX_DIM,
        window=1,
        block_tokens=4 * ratio,
        entry_format="float32",
    )


def _compressor(case: Case, dtype: torch.dtype) -> Compressor:
    wkv = case.weight("wkv").to(dtype)
    weights = CompressorWeights(
        wkv=wkv,
        wgate=case.weight("wgate").to(dtype) if case.integer("ratio") > 1 else None,
        norm=case.weight("norm"),
    )
    keys = IndexKeyWeights(wk=torch.zeros(INDEX_DIM, wkv.shape[0], dtype=dtype), norm=torch.ones(INDEX_DIM))
    ops = select(torch.device("cpu")).ops
    return Compressor(0, case.integer("ratio"), NORM_EPS, weights, keys, ops)


def _prefill(compressor: Compressor, layout: KVLayout, x: torch.Tensor, ratio: int) -> Tensors:
    """All sequences of the case as one ragged step. Tails are read from the state they leave behind."""
    sequences, length, width = x.shape
    pool = KVPool(layout, num_rows=1 + sequences * layout.blocks_for(length), num_slots=1 + sequences)
    step = chunk_step(layout, pool, [Chunk(0, length)] * sequences)
    latent = compressor.latent(x.flatten(0, 1), step).view(sequences, length, width)[:, ratio - 1 :: ratio]
    if ratio == 1:
        return {"latent": latent}
    tail = torch.arange(length // ratio * ratio, length).expand(sequences, -1)
    gates, values = step.views.states[0].read(torch.arange(1, 1 + sequences), tail).unbind(2)
    return {"latent": latent, "kv_tail": values, "score_tail": gates}


def _steps(case: Case, compressor: Compressor, layout: KVLayout, x: torch.Tensor, ratio: int) -> Tensors:
    total, first = x.shape[0], case.integer("n0")
    pool = KVPool(layout, num_rows=1 + layout.blocks_for(total), num_slots=2)
    latents, states = [compressor.latent(x[:first], chunk_step(layout, pool, [Chunk(0, first)]))], []
    for position in range(first, total):
        step = chunk_step(layout, pool, [Chunk(position, 1)])
        latents.append(compressor.latent(x[position : position + 1], step))
        states.append(_reference_state(step.views.states[0].entries[1], position, first // ratio * ratio, ratio))
    closed = [p for p in range(total) if (p + 1) % ratio == 0]
    rows = torch.cat(latents)
    whole = compressor.latent(x, chunk_step(layout, KVPool(layout, num_rows=8, num_slots=2), [Chunk(0, total)]))
    return {
        "prefill_latent": rows[[p for p in closed if p < first]][None],
        "step_latents": rows[[p for p in closed if p >= first]],
        "emitted_at": torch.tensor([p for p in closed if p >= first]),
        "states": torch.stack(states),
        "whole": whole[closed][None],
    }


def _reference_state(ring: torch.Tensor, position: int, first: int, ratio: int) -> torch.Tensor:
    """Our ring [S, 2, D] (gate, value) after ``position``, in the stored form [2, r, D] (value, gate): slot i holds the
    latest position that is i modulo r, if the decode has written it or the open group of the prefill holds it."""
    latest = [position - (position - i) % ratio for i in range(ratio)]
    gates, values = ring[[p % ring.shape[0] for p in latest]].unbind(1)
    filled = torch.tensor([p >= first for p in latest]).unsqueeze(1)
    return torch.stack((torch.where(filled, values, 0.0), torch.where(filled, gates, UNFILLED)))
