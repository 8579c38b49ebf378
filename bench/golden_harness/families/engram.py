"""Engram: token map, constants, hash, lookup, gate, projection (spec §13)."""

from __future__ import annotations

import torch

from bench.golden_harness.case import Case, GoldenFormatError, Tensors
from bench.golden_harness.registry import runner
from headrace.engine.text.engram_map import engram_token_map
from headrace.kernels.reference.engram import engram_constants, engram_context
from headrace.kernels.select import select
from headrace.kernels.weights import Fp8Rows, Fp8Weight

NORM_EPS = 1e-20


@runner("engram")
def run(case: Case) -> Tensors:
    name = case.short_name
    if name.startswith("constants"):
        return _constants(case)
    if "history" in case.inputs:
        return _hash(case)
    if name.startswith("table_lookup"):
        return _lookup(case)
    if name.startswith("gate"):
        return _gate(case)
    if name.startswith("module"):
        return _module(case)
    if "tokenizer_json" in case.inputs:
        token_map = torch.tensor(engram_token_map(bytes(case.input("tokenizer_json").tolist()).decode()))
        return {"token_map": token_map, "size": token_map.max() + 1}
    raise GoldenFormatError(f"unknown engram case {case.name}")


def _constants(case: Case) -> Tensors:
    constants = engram_constants(
        tuple(case.config["layer_ids"]),
        case.integer("max_ngram"),
        case.integer("heads"),
        case.integer("vocab_size"),
        case.integer("compressed_vocab"),
    )
    return {
        "primes": constants.primes,
        "offsets": constants.offsets,
        "multipliers": constants.multipliers,
        "table_rows": constants.table_rows,
    }


def _hash(case: Case) -> Tensors:
    """All sequences of the case as one ragged step, hashed in one go and one token at a time with look-back."""
    history = case.input("history")
    whole = _hash_rows(case, history, torch.full((history.shape[0], case.integer("max_ngram") - 1), -1))
    pieces, lookback = [], torch.full((history.shape[0], case.integer("max_ngram") - 1), -1)
    for position in range(history.shape[1]):
        token = history[:, position : position + 1]
        pieces.append(_hash_rows(case, token, lookback))
        lookback = torch.cat((lookback, token), dim=1)[:, 1:]
    if not torch.equal(whole, torch.cat(pieces, dim=1)):
        raise AssertionError("hashing token by token with look-back differs from hashing the whole")
    return {"hash": whole}


def _hash_rows(case: Case, history: torch.Tensor, lookback: torch.Tensor) -> torch.Tensor:
    ops = select(torch.device("cpu")).ops
    sequences, length = history.shape
    context = engram_context(
        history.flatten(),
        history.flatten() < 0,
        torch.arange(sequences).repeat_interleave(length),
        torch.arange(length).repeat(sequences),
        lookback,
        torch.arange(case.integer("compressed_vocab")),
        case.integer("pad_id"),
    )
    layers = zip(case.weight("multipliers"), case.weight("primes"), case.weight("offsets"), strict=True)
    return torch.stack(
        [ops.engram_hash(context, *constants).reshape(sequences, length, -1) for constants in layers], dim=2
    )


def _lookup(case: Case) -> Tensors:
    ops = select(torch.device("cpu")).ops
    ids, values, scales = case.input("ids"), case.weight("table"), case.weight("scale")
    rows = ids.reshape(-1, ids.shape[-1])

    def gather(first: int, last: int) -> torch.Tensor:
        table = Fp8Rows(values[first:last], scales[first:last])
        return ops.engram_lookup(rows - first, table, torch.bfloat16).reshape(*ids.shape, -1)

    shards = {f"shard{i}": gather(first, last) for i, (first, last) in enumerate(case.config["shards"])}
    return {"rows": gather(0, values.shape[0]), **shards}


def _gate(case: Case) -> Tensors:
    x, key, value, mask = case.input("x"), case.input("key"), case.input("value"), case.input("token_mask")
    return {
        "y": _gated(case, x, key, value, torch.zeros_like(mask)),
        "y_masked": _gated(case, x, key, value, ~mask),
    }


def _gated(
    case: Case, streams: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, image_mask: torch.Tensor
) -> torch.Tensor:
    weights = case.weight("q_weight"), case.weight("k_weight")
    ops = select(torch.device("cpu")).ops
    return ops.engram_gate(streams, keys, value, *weights, image_mask, case.number("eps", NORM_EPS))


def _module(case: Case) -> Tensors:
    ops = select(torch.device("cpu")).ops
    x, rows = case.input("x"), case.input("rows")
    projected = ops.linear(rows.flatten(-2), Fp8Weight(case.weight("wkv"), case.weight("wkv_scale")))
    hc, dim = x.shape[-2:]
    keys, value = projected[..., : hc * dim].reshape(x.shape), projected[..., hc * dim :]
    return {"y": _gated(case, x, keys, value, torch.zeros(x.shape[:-2], dtype=torch.bool))}
