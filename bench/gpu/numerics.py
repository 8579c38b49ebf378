"""The models' arithmetic on a device beside the same on the CPU in float32: logits of prompts and of decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from bench.golden_harness.case import load_cases
from bench.golden_harness.evaluate import evaluate
from bench.golden_harness.families.composed import run_attention, run_layers
from bench.golden_harness.families.e2e import run_once
from bench.golden_harness.serving import admit, prefill, run_step
from bench.gpu.compare import LogitCheck, compare_logits
from bench.gpu.tiny import prompt_of
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.model import Model
from headrace.kvcache.pool import KVPool

STEPS = 6


def logits_of(model: Model, device: str, length: int, chunk: int, forced: Sequence[int]) -> torch.Tensor:
    """Logits [prompt rows + steps, vocab] of one sequence: its prompt in chunks, then one forced token a step."""
    prompt = prompt_of(length, 11)
    rows = 1 + model.layout.blocks_for(length + len(forced))
    pool = KVPool(model.layout, num_rows=rows, num_slots=2, device=device)
    sequence = admit(pool, prompt, capacity=length + len(forced))
    parts = [prefill(model, pool, sequence, chunk, every_row=True)]
    for token in forced:
        sequence.ids.append(token)
        parts.append(run_step(model, pool, [(sequence, 1)]))
    return torch.cat(parts)


def check_model(
    folder: Path,
    device: str,
    *,
    length: int,
    chunk: int,
    mode: Literal["noquant", "kvquant", "full"] = "noquant",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    attention: Literal["auto", "absorbed", "naive"] = "auto",
    reference: ModelSettings | None = None,
) -> LogitCheck:
    """Against ``reference`` on the CPU; without one, the same settings there."""
    settings = ModelSettings(device=device, numeric_mode=mode, dtype=dtype, attention=attention)
    plain = reference or ModelSettings(numeric_mode=mode, dtype=dtype, attention=attention)
    forced = prompt_of(STEPS, 12)
    expected = logits_of(load_model(folder, plain), "cpu", length, length, forced)
    got = logits_of(load_model(folder, settings), device, length, chunk, forced)
    return compare_logits(expected, got)


def golden_cases(folder: Path, device: str) -> dict[str, dict[str, str | int]]:
    """The golden set's cases that run a checkpoint: whole models in float32, in three chunkings; attention sublayers
    and layers in the other numeric modes, each fed with its own stored input, so that no rounding adds up."""
    loaded = load_cases(folder)
    cases = [case for case in loaded if case.family == "e2e" and case.config.get("mode") == "noquant"]
    results: dict[str, dict[str, str | int]] = {}
    for chunk, block in ((7, 32), (128, 128), (1 << 30, 128)):
        runner = partial(run_once, chunk=chunk, block_tokens=block, device=device)
        verdict = evaluate(cases, {"e2e": runner})
        name = f"chunks of {chunk if chunk < 1 << 20 else 'all'}, blocks of {block}"
        results[name] = {"passed": len(verdict.passed), **verdict.failed}
    parts = [case for case in loaded if case.family in ("attn_chain", "layers")]
    forced = {"attn_chain": partial(run_attention, device=device), "layers": partial(run_layers, device=device)}
    verdict = evaluate(parts, forced)
    results["layer by layer, noquant, kvquant, full"] = {"passed": len(verdict.passed), **verdict.failed}
    return results
