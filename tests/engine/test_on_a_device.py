"""A step on a device copies nothing from or to the host that would make the host wait (design.md, "Inside a worker").

Torch's ``meta`` device stands in for a GPU here: it has shapes and no bytes, so whatever reads a tensor back fails at
once, and mixing in a CPU tensor is seen. What a GPU does with the kernels is ``bench/gpu``'s business.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu.tiny import make_v3
from headrace.engine.batch import StepBatch
from headrace.engine.graphs import powers_of_two
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.model import Model
from headrace.engine.models.deepseek_v41.make import make_tiny, plain_vocabulary, tiny_config
from headrace.engine.sampler import sample
from headrace.engine.sampling_batch import RowSampling, build_batch
from headrace.engine.sampling_params import SamplingParams
from headrace.kvcache.pool import KVPool

META = torch.device("meta")
FEW = {"hc_mult": 2, "hc_sinkhorn_iters": 2, "n_routed_experts": 2, "engram_n_heads": 1}
"""Every kind of layer with few operators each: under a watch they cost half a millisecond."""


class HostTensors(TorchDispatchMode):
    """Notes operators that touch a CPU tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device.type == "cpu" for tensor in tensors):
            self.seen.append(str(func))
        return out


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls of torch.tensor, which copies from pageable memory on a GPU and cannot be captured."""
    calls: list[object] = []
    plain = torch.tensor

    def noted(data: object, **options: Any) -> torch.Tensor:
        calls.append(data)
        return plain(data, **options)

    monkeypatch.setattr(torch, "tensor", noted)
    return calls


def step_of(model: Model, starts: tuple[int, ...], lengths: tuple[int, ...]) -> StepBatch:
    rows, count = sum(lengths), len(lengths)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=META)

    return StepBatch(
        token_ids=zeros(rows),
        positions=zeros(rows),
        sequence_of_row=zeros(rows),
        starts=starts,
        lengths=lengths,
        block_tables=zeros(count, 8),
        slots=zeros(count),
        keep_from=(0,) * count,
        lookback=zeros(count, model.lookback_tokens),
        image_mask=torch.zeros(rows, dtype=torch.bool, device=META),
        image_embeddings=None,
        logit_rows=zeros(count),
    )


def load(folder: Path, kind: str) -> Model:
    if kind.startswith("v3"):
        make_v3(folder, seed=0)
        return load_model(folder, ModelSettings(device="meta", block_tokens=16, attention=kind.removeprefix("v3 ")))  # type: ignore[arg-type]
    vocabulary = plain_vocabulary(97, 61)
    make_tiny(folder, 1, tiny_config(vocabulary, FEW), vocabulary.token_map)
    return load_model(folder, ModelSettings(device="meta", block_tokens=16, numeric_mode=kind.removeprefix("v41 ")))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["v3 naive", "v3 absorbed", "v41 noquant", "v41 full"])
def test_steps_stay_on_the_device(tmp_path: Path, kind: str, uploads: list[object]) -> None:
    """Prefill and mixed steps touch no host tensor but their index lists; decode steps upload nothing at all."""
    model = load(tmp_path, kind)
    pool = KVPool(model.layout, num_rows=9, num_slots=5, num_snapshots=3, device=META)
    decode = step_of(model, (5, 50, 99), (1, 1, 1))
    model.forward(decode, pool)  # constants are uploaded once, as graphs.py's warm-up does
    uploads.clear()
    with HostTensors() as watch:
        logits = model.forward(decode, pool)
        assert uploads == []
        model.forward(step_of(model, (0, 20, 9), (7, 1, 30)), pool)
    assert watch.seen == []
    assert logits.shape == (3, model.vocab_size)


def test_the_watch_sees_a_host_tensor() -> None:
    with HostTensors() as watch:
        torch.zeros(3, device=META)[torch.zeros(2, dtype=torch.int64)]
    assert watch.seen


def test_sampling_stays_on_the_device() -> None:
    """Every kind of row; the ids are read back by the step, nothing by the sampler."""
    kinds = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=5, min_p=0.1),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(temperature=1.0, logit_bias=((3, 1.5),)),
    ]
    rows = [RowSampling(params, 2**64 - 1, 9, (1, 2), (3,), suppressed_ids=(4,)) for params in kinds]
    batch = build_batch(rows, 97, META)
    with HostTensors() as watch:
        sampled = sample(torch.zeros(len(rows), 97, device=META), batch)
    assert watch.seen == []
    assert sampled.token_ids.device == META


@pytest.mark.parametrize(("largest", "sizes"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))])
def test_sizes_that_decode_steps_are_padded_to(largest: int, sizes: tuple[int, ...]) -> None:
    assert powers_of_two(largest) == sizes
