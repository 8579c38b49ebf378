"""Which backend serves which operator, decided once when a model is loaded and reported in a worker's status."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from headrace.kernels.available import has_triton
from headrace.kernels.ops import Linear, LinearFp32, Operators
from headrace.kernels.reference import (
    compress,
    engram,
    hyper,
    linear,
    moe,
    norm,
    quant,
    rope,
    selection,
    sparse_attention,
)
from headrace.kernels.reference.activation import silu


@dataclass(frozen=True)
class Selection:
    """Operators of one model, and where each comes from."""

    ops: Operators
    backends: tuple[tuple[str, str], ...]
    """(operator, backend) in the order of `Operators`, for the status report."""


class UnsupportedKernels(ValueError):
    """What was asked of the operators does not exist on this device."""


def select(device: torch.device, *, batch_invariant: bool = False) -> Selection:
    """Operators for models on ``device``. ``batch_invariant`` (L5) is float32 on the CPU."""
    if batch_invariant and device.type != "cpu":
        raise UnsupportedKernels(f"batch_invariant runs on the CPU only, not on {device}: turn it off")
    product = _linear(device, batch_invariant)
    product_fp32 = linear.linear_fp32_batch_invariant if batch_invariant else linear.linear_fp32
    run_experts = moe.experts_grouped if device.type == "cpu" else moe.experts_dense
    activation = silu if batch_invariant else functional.silu
    feed_forward = partial(moe.swiglu, linear=product, activation=activation)
    ops = Operators(
        linear=product,
        linear_fp32=product_fp32,
        rms_norm=norm.rms_norm,
        rope=rope.rope,
        rope_halves=rope.rope_halves,
        round_trip_e4m3=quant.round_trip_e4m3,
        round_trip_fp4_index=quant.round_trip_fp4_index,
        round_trip_fp4_main=quant.round_trip_fp4_main,
        encode_swa=quant.encode_swa,
        decode_swa=quant.decode_swa,
        encode_main=quant.encode_main,
        decode_main=quant.decode_main,
        encode_index=quant.encode_index,
        decode_index=quant.decode_index,
        hyper_mixes=partial(hyper.hyper_mixes, product=product_fp32),
        hyper_collapse=hyper.hyper_collapse,
        hyper_expand=hyper.hyper_expand,
        engram_hash=engram.engram_hash,
        engram_lookup=engram.engram_lookup,
        engram_gate=engram.engram_gate,
        route=partial(moe.route, product=product_fp32),
        route_grouped=partial(moe.route_grouped, product=product_fp32),
        swiglu=feed_forward,
        experts=partial(run_experts, feed_forward=feed_forward),
        pool_group=compress.pool_group,
        index_scores=selection.index_scores,
        select_entries=selection.select_entries,
        candidate_blocks=selection.candidate_blocks,
        sparse_attention=sparse_attention.sparse_attention,
    )
    name = "reference (batch invariant)" if batch_invariant else "reference"
    backends = {field.name: name for field in fields(Operators)}
    if product is linear.linear_widening:
        backends["linear"] = "reference (bf16 in float32)"
    if has_triton(device.type):
        fused = _triton(product_fp32)
        ops = replace(ops, **fused)
        backends |= dict.fromkeys(fused, "triton")
    return Selection(ops, tuple(backends.items()))


def _triton(product_fp32: LinearFp32) -> dict[str, Any]:
    """Operators that Triton serves, by name."""
    # Not at the top: Triton is there only where torch was built for CUDA.
    from headrace.kernels.triton import hyper as fused_hyper
    from headrace.kernels.triton import norm as fused_norm

    return {
        "rms_norm": fused_norm.rms_norm,
        "hyper_mixes": partial(fused_hyper.hyper_mixes, product=product_fp32),
        "hyper_collapse": fused_hyper.hyper_collapse,
        "hyper_expand": fused_hyper.hyper_expand,
    }


def _linear(device: torch.device, batch_invariant: bool) -> Linear:
    if batch_invariant:
        return linear.linear_batch_invariant
    if device.type == "cpu" and not _cpu_has_bf16():
        return linear.linear_widening
    return linear.linear


def _cpu_has_bf16() -> bool:
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16"))
