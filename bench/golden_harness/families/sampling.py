"""Keyed random numbers and the sampled distribution (spec §16)."""

from __future__ import annotations

from bench.golden_harness.case import Case, GoldenFormatError, Tensors
from bench.golden_harness.registry import runner
from headrace.engine.distribution import distribution, pick
from headrace.engine.rng import Purpose, uniform, uniform_bits


@runner("sampling")
def run(case: Case) -> Tensors:
    if case.short_name.startswith("uniform_case"):
        purpose = Purpose(case.integer("case"))
        return {"u53": uniform_bits(case.input("seed_i64"), case.input("position"), purpose)}
    if case.short_name.startswith("target_sample"):
        settings = (case.input(name) for name in ("temperature", "top_p", "top_k"))
        logprobs = distribution(case.input("logits"), *settings)
        u = uniform(case.input("seed_i64"), case.input("position"))
        return {"logprobs": logprobs, "token": pick(logprobs.double().exp(), u)}
    raise GoldenFormatError(f"unknown sampling case {case.name}")
