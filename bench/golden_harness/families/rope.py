"""Rotary tables and rotations (spec §5)."""

from __future__ import annotations

import torch

from bench.golden_harness.case import Case, Tensors
from bench.golden_harness.registry import runner
from headrace.kernels.reference.rope import Yarn, rope, rope_frequencies, rope_table


@runner("rope")
def run(case: Case) -> Tensors:
    if "positions" in case.inputs:
        yarn = Yarn(
            factor=case.number("factor"),
            original_tokens=case.integer("original_seq_len"),
            beta_fast=case.number("beta_fast"),
            beta_slow=case.number("beta_slow"),
        )
        frequencies = rope_frequencies(case.integer("dim"), case.number("base"), yarn)
        cos, sin = rope_table(case.input("positions"), frequencies)
        return {"inv_freq": frequencies, "cos": cos, "sin": sin}
    x, cos, sin = case.input("x"), case.input("cos"), case.input("sin")
    return {
        "y": torch.stack([rope(sequence, cos, sin) for sequence in x]),
        "y_inverse": torch.stack([rope(sequence, cos, sin, inverse=True) for sequence in x]),
    }
