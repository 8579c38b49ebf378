"""Index keys, queries, scores, candidate blocks and selection (spec §9).

Stored candidates come from an unstable top-k and are marked exact. Where blocks tie (the relu makes exact zeros common)
the spec's rule, lower position first, may choose other blocks of the same score. A stored choice that differs from
ours in such blocks only is as valid as ours, and is what the case's later parts were computed from: it is taken over.
"""

from __future__ import annotations

import torch

from bench.golden_harness.case import Case, Tensors
from bench.golden_harness.registry import runner
from headrace.engine.models.deepseek_v41.compressor import Compressor
from headrace.engine.models.deepseek_v41.config import RopeConfig
from headrace.engine.models.deepseek_v41.indexer import index_queries
from headrace.engine.models.deepseek_v41.step import Rotation, frequencies
from headrace.engine.models.deepseek_v41.weights import CompressorWeights, IndexKeyWeights, IndexQueryWeights
from headrace.kernels.reference.rope import rope_table
from headrace.kernels.reference.selection import (
    candidate_blocks,
    entries_of_blocks,
    index_scores,
    select_entries,
    visible_mask,
)
from headrace.kernels.select import select

NORM_EPS = 1e-20
MINUS_INFINITY = -1e30


@runner("indexer")
def run(case: Case) -> Tensors:
    if "latent" in case.inputs:
        return _whole(case)
    if "lens" in case.inputs:
        scores, visible = _scores(case), case.input("lens").flatten()
        return {"keep": _candidates(scores, visible, case.integer("block"), case.integer("blocks"))[None]}
    scores = _scores(case)
    if "end_pos" not in case.config:
        return {"recommended": select_entries(scores, case.integer("index_topk"))[0]}
    visible = torch.tensor([case.integer("end_pos") // case.integer("ratio")])
    return _selection(case, scores, visible)


def _scores(case: Case) -> torch.Tensor:
    scores = case.input("scores")[0]
    return scores.masked_fill(scores <= MINUS_INFINITY, float("-inf"))


def _candidates(scores: torch.Tensor, visible: torch.Tensor, block: int, count: int) -> torch.Tensor:
    return entries_of_blocks(candidate_blocks(scores, visible, block, count), block, scores.shape[-1])


def _take_over_ties(ours: torch.Tensor, stored: torch.Tensor, masked: torch.Tensor, block: int) -> torch.Tensor:
    """Rows of ``stored`` that differ from ``ours`` by a swap of equally scored blocks; our rows otherwise."""
    rows = []
    for mine, theirs, scores in zip(ours, stored, masked, strict=True):
        best = torch.stack([part.max() for part in scores.split(block)])
        chosen, other = (torch.stack([part.any() for part in mask.split(block)]) for mask in (mine, theirs))
        whole_blocks = torch.equal(entries_of_blocks(other[None], block, scores.shape[0])[0], theirs)
        swapped = best[chosen != other].tolist()
        tied = whole_blocks and int(chosen.sum()) == int(other.sum()) and len(set(swapped)) == 1
        rows.append(theirs if tied else mine)
    return torch.stack(rows)


def _selection(case: Case, scores: torch.Tensor, visible: torch.Tensor) -> dict[str, torch.Tensor]:
    masked = scores.masked_fill(~visible_mask(visible, scores.shape[-1]), float("-inf"))
    block = case.integer("candidate_block")
    candidates = _candidates(masked, visible, block, case.integer("candidate_blocks"))
    candidates = _take_over_ties(candidates, case.expected("candidates")[0], masked, block)
    restricted = masked.masked_fill(~candidates, float("-inf"))
    k, offset = case.integer("index_topk"), case.integer("offset")

    def shifted(scores: torch.Tensor) -> torch.Tensor:
        chosen = select_entries(scores, k)
        return torch.where(chosen >= 0, chosen + offset, -1)[None]

    return {
        "masked": masked[None],
        "candidates": candidates[None],
        "topk": shifted(masked),
        "topk_cand": shifted(restricted),
    }


def _whole(case: Case) -> Tensors:
    """Each part is fed with the stored result of the part before it, as the case says."""
    ops = select(torch.device("cpu")).ops
    ratio, latent, x, qr = case.integer("ratio"), case.input("latent")[0], case.input("x")[0], case.input("qr")[0]
    rope = case.config["rope"]
    table = frequencies(
        RopeConfig(rope["base"], case.integer("rope_dim"), rope["original_seq_len"], rope["factor"], 32.0, 1.0),
        torch.device("cpu"),
    )

    def turn(positions: torch.Tensor) -> Rotation:
        return Rotation(*rope_table(positions, table))

    key_weights = IndexKeyWeights(case.weight("wk").to(latent.dtype), case.weight("k_norm"))
    unused = CompressorWeights(torch.empty(0), None, torch.empty(0))
    compressor = Compressor(0, ratio, NORM_EPS, unused, key_weights, ops)
    keys = ops.round_trip_fp4_index(compressor.index_keys(latent, turn(torch.arange(latent.shape[0]) * ratio)))
    query_weights = IndexQueryWeights(case.weight("wq_b").to(qr.dtype), case.weight("weights_proj").to(x.dtype))
    positions = torch.arange(x.shape[0])
    queries, weights = index_queries(
        x, qr, query_weights, turn(positions), ops, heads=case.integer("index_heads"), quantised=True
    )
    scores = index_scores(case.expected("index_q"), case.expected("index_k"), case.expected("weights"))
    parts = {"index_k": keys[None], "index_q": queries[None], "weights": weights[None], "scores": scores}
    return parts | _selection(case, case.expected("scores")[0], (positions + 1) // ratio)
