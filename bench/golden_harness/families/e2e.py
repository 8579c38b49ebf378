"""Whole-model cases, through the serving path: pool rows, block tables, slots, chunked prefill, hand-over, steps.

Every case runs in chunks of 7 (blocks of 32 tokens), of 128 and in one piece; after each prefill the rows and the slot
are copied to a second pool, where the steps run. The three must agree bit for bit (L5); the last is compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.golden_harness.case import Case, GoldenFormatError, Tensors
from bench.golden_harness.loading import model_of
from bench.golden_harness.recorder import Recorder
from bench.golden_harness.registry import runner
from bench.golden_harness.serving import ServedSequence, admit, hand_over, prefill, run_step
from headrace.engine.models.deepseek_v41.model import DeepseekV41
from headrace.engine.vision.geometry import ImagePlan
from headrace.engine.vision.loading import load_vision_tower
from headrace.kvcache.pool import KVPool

WAYS = ((7, 32), (128, 128), (1 << 30, 128))
"""(chunk, block_tokens) of each run."""
REPLAY_MARGIN = 6
"""Bounded replay cases keep window + 6 tokens (../shared/golden/v41/README.md)."""


@dataclass(frozen=True)
class _Run:
    """One way through a case."""

    model: DeepseekV41
    prefill: torch.Tensor
    """[1 or prompt, vocab]."""
    steps: torch.Tensor
    """[steps, vocab]."""
    tokens: list[int]
    recorder: Recorder


@runner("e2e")
def run(case: Case) -> Tensors:
    runs = [_serve(case, chunk, block_tokens) for chunk, block_tokens in WAYS]
    last = runs[-1]
    for one, way in zip(runs, WAYS, strict=True):
        if not (torch.equal(one.prefill, last.prefill) and torch.equal(one.steps, last.steps)):
            raise AssertionError(f"chunks of {way[0]} with blocks of {way[1]} give other logits than one piece")
    return _outputs(case, last)


def run_once(case: Case, chunk: int, block_tokens: int, device: str) -> Tensors:
    """One way through a case on any device, for bench/gpu: off the CPU chunkings agree up to rounding only."""
    return _outputs(case, _serve(case, chunk, block_tokens, device))


def _serve(case: Case, chunk: int, block_tokens: int, device: str = "cpu") -> _Run:
    model = model_of(case, block_tokens=block_tokens, device=device)
    prompt = case.input("prompt").tolist()
    forced = case.input("forced_tokens").tolist() if "forced_tokens" in case.inputs else None
    count = int(case.config.get("steps", 0))
    capacity = len(prompt) + count
    rows = 1 + model.layout.blocks_for(capacity)
    pools = [KVPool(model.layout, num_rows=rows, num_slots=2, device=device) for _ in range(2)]
    sequence = _admit(case, model, pools[0], prompt, capacity)
    recorder = Recorder()
    model.probe = recorder
    try:
        first = prefill(model, pools[0], sequence, chunk, every_row=count == 0)
        sequence = hand_over(sequence, pools[0], pools[1])
        logits = [first]
        for step in range(count):
            sequence.ids.append(int(logits[-1][-1].argmax()) if forced is None else forced[step])
            logits.append(run_step(model, pools[1], [(sequence, 1)]))
    finally:
        model.probe = None
    tokens = [int(row[-1].argmax()) for row in logits]
    steps = torch.cat(logits[1:]) if count else first.new_zeros(0, model.vocab_size)
    return _Run(model, first, steps, tokens, recorder)


def _admit(case: Case, model: DeepseekV41, pool: KVPool, prompt: list[int], capacity: int) -> ServedSequence:
    keep = len(prompt) - model.layout.window - REPLAY_MARGIN if "compact_replay" in case.name else 0
    if "patches" not in case.inputs:
        return admit(pool, prompt, capacity=capacity, keep_from=keep)
    image = [kind >= 0 for kind in case.input("token_types").tolist()]
    return admit(pool, prompt, capacity=capacity, keep_from=keep, image=image, embeddings=_embeddings(case))


def _embeddings(case: Case) -> torch.Tensor:
    if case.checkpoint is None:
        raise GoldenFormatError(f"case {case.name} names no checkpoint")
    tower = load_vision_tower(case.checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    rows, columns = case.input("grid_hw").tolist()
    patch, merge = tower.config.patch_size, tower.config.downsample_ratio
    plan = ImagePlan(
        height=rows * patch,
        width=columns * patch,
        patch_rows=rows,
        patch_columns=columns,
        rows=-(-rows // merge),
        columns=-(-columns // merge),
        stretched=False,
    )
    return tower.encode(case.input("patches").float(), plan)


def _outputs(case: Case, run: _Run) -> dict[str, torch.Tensor]:
    recorder, model = run.recorder, run.model
    length, steps = case.inputs["prompt"].shape[0], run.steps.shape[0]
    got = {
        "tokens": torch.tensor(run.tokens),
        "logits": torch.cat((run.prefill, run.steps)),
        "step_logits": run.steps,
    }
    targets = model.config.draft_targets
    if targets:
        ends = [length - 1 + i for i in range(steps + 1)]
        got["main_hidden"] = torch.cat([recorder.rows("feature", layer, ends) for layer in targets], dim=-1)
    if "positions" not in case.inputs:
        return got
    positions = case.input("positions").tolist()
    layers = range(model.config.num_layers)
    got["layer_out"] = torch.stack([recorder.rows("layer_output", i, positions) for i in layers])
    got["layer_pre_mix"] = torch.stack([recorder.rows("pre_output", i, positions) for i in layers])
    if steps:
        ends = [length, length + steps - 1]
        got["layer_out_steps"] = torch.stack([recorder.rows("layer_output", i, ends) for i in layers])
    for layer in model.config.index_source_layers:
        got[f"topk_layer{layer}_prefill"] = recorder.rows("selection", layer, positions)
        if steps:
            got[f"topk_layer{layer}_last_step"] = recorder.rows("selection", layer, [length + steps - 1])[0]
    source = model.config.candidate_source_layer
    if source is not None and "candidates_prefill" in case.outputs:
        width = case.outputs["candidates_prefill"].shape[-1]
        got["candidates_prefill"] = recorder.rows("candidates", source, positions, width)
    return got
