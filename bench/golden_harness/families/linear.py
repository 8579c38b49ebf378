"""Quantised linears and the norm (spec §3.6, §4)."""

from __future__ import annotations

import torch

from bench.golden_harness.case import Case, Tensors
from bench.golden_harness.registry import runner
from headrace.kernels.select import select
from headrace.kernels.weights import Fp4Weight, Fp8Weight, Weight


def quantised(case: Case, name: str, scale: str) -> Weight:
    """Weight ``name`` of a case with its scales: fp8 by its dtype, else packed fp4."""
    values, scales = case.weight(name), case.weight(scale)
    return Fp8Weight(values, scales) if values.dtype == torch.float8_e4m3fn else Fp4Weight(values, scales)


@runner("linear")
def run(case: Case) -> Tensors:
    ops = select(torch.device("cpu")).ops
    if "scale" not in case.weights:
        return {"y": ops.rms_norm(case.input("x"), case.weight("weight"), case.number("eps"))}
    return {"y": ops.linear(case.input("x"), quantised(case, "weight", "scale"))}
