"""Decode steps as captured graphs beside the same steps eager: equal bytes, times, whether the host waits in one."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from bench.golden_harness.serving import admit, make_batch, on_device, prefill
from bench.gpu.tiny import prompt_of
from headrace.engine.graphs import DecodeGraphs
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.sampler import sample
from headrace.engine.sampling_batch import RowSampling, build_batch
from headrace.engine.sampling_params import SamplingParams
from headrace.kvcache.pool import KVPool

TURNS = 15


@dataclass(frozen=True)
class Captured:
    """One decode step of some sequences."""

    sequences: int
    context: int
    equal: bool
    """Logits of the replay are the eager step's, byte for byte."""
    eager_us: float
    """Median, on the device's clock; launching is most of it."""
    captured_us: float
    eager_by_captured: float
    host_waits: list[str]
    """Places where a decode step or its sampling made the host wait for the device."""

    @property
    def ok(self) -> bool:
        return self.equal and not self.host_waits


def check_captured(
    folder: Path,
    device: str,
    *,
    sequences: int,
    context: int,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    mode: Literal["noquant", "kvquant", "full"] = "noquant",
) -> Captured:
    """A step of ``sequences`` rows, each with ``context`` tokens before it."""
    model = load_model(folder, ModelSettings(device=device, dtype=dtype, numeric_mode=mode))
    layout = model.layout
    rows = sequences * layout.blocks_for(context + 1)
    pool = KVPool(layout, num_rows=rows + 1, num_slots=sequences + 1, device=device)
    served = []
    for index in range(sequences):
        sequence = admit(pool, prompt_of(context, 50 + index), capacity=context + 1)
        prefill(model, pool, sequence, context)
        sequence.ids.append(7)
        served.append((sequence, 1))
    batch = on_device(make_batch(model, served), pool.device)
    # Captured over as many keys as the block table holds; the eager step over the same, so that bytes can be equal.
    whole = replace(batch, starts=(batch.block_tables.shape[1] * layout.block_tokens - 1,) * sequences)
    graphs = DecodeGraphs(model, pool)
    with torch.inference_mode():
        eager = model.forward(whole, pool).clone()
        equal = torch.equal(eager, graphs.forward(batch))
        waits = host_waits(lambda: sampled(model.forward(batch, pool)))
        eager_us = _median_us(lambda: model.forward(batch, pool))
        captured_us = _median_us(lambda: graphs.forward(batch))
    return Captured(
        sequences, context, equal, round(eager_us), round(captured_us), round(eager_us / captured_us, 1), waits
    )


def sampled(logits: torch.Tensor) -> torch.Tensor:
    """What a step does behind the forward pass, but for reading the ids."""
    kinds = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.9))
    rows = [RowSampling(kinds[index % 2], 7, 100) for index in range(logits.shape[0])]
    return sample(logits, build_batch(rows, logits.shape[1], logits.device)).token_ids


def host_waits(work: Callable[[], object]) -> list[str]:
    """Where the host waited for the device, as torch tells; the first call's constants do not count."""
    work()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [
        f"{Path(found.filename).name}:{found.lineno}"
        for found in caught
        if "called a synchronizing" in str(found.message)
    ]
    return sorted(set(places))


def _median_us(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(TURNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))
