"""The forward pass never reads a tensor back: it runs where there are no values, and decode uploads nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from bench.golden_harness.serving import ServedSequence, admit, make_batch
from headrace.engine.batch import StepBatch
from headrace.engine.models.deepseek_v41.model import DeepseekV41
from headrace.kvcache.pool import KVPool


def on_meta(batch: StepBatch) -> StepBatch:
    tensors = {f.name: value for f in fields(batch) if isinstance(value := getattr(batch, f.name), torch.Tensor)}
    return replace(batch, **{name: value.to("meta") for name, value in tensors.items()})


def test_no_host_read(model_of: Callable[..., DeepseekV41]) -> None:
    """On the meta device a host read or a tensor left on another device raises: prefill and decode steps."""
    model = model_of("small", "full", device="meta")
    pool = KVPool(model.layout, num_rows=30, num_slots=4, device="meta")
    sequences = [admit(pool, range(3, 40 + i), capacity=48, keep_from=keep) for i, keep in enumerate((0, 12))]
    sequences[0].image = [3 <= p < 9 for p in range(20)]
    sequences[0].embeddings = torch.zeros(6, model.hidden_size)

    def run(work: list[tuple[ServedSequence, int]]) -> int:
        logits = model.forward(on_meta(make_batch(model, work)), pool)
        for sequence, n in work:
            sequence.computed += n
        return logits.shape[0]

    assert run([(sequences[0], 10), (sequences[1], 14)]) == 2
    for sequence in sequences:
        sequence.computed = len(sequence.ids) - 1
    assert run([(sequence, 1) for sequence in sequences]) == 2


def test_a_decode_step_uploads_nothing(model_of: Callable[..., DeepseekV41], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph replays may not copy from the host: the batch's own tensors are all that a step reads."""
    model = model_of()
    pool = KVPool(model.layout, num_rows=30, num_slots=4)
    sequences = [admit(pool, range(3, 12 + i), capacity=40) for i in range(3)]
    model.forward(make_batch(model, [(s, len(s.ids) - 1) for s in sequences]), pool)
    for sequence in sequences:
        sequence.computed = len(sequence.ids) - 1
    batch = make_batch(model, [(sequence, 1) for sequence in sequences])

    def refused(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("a decode step made a tensor of host values")

    monkeypatch.setattr(torch, "tensor", refused)
    assert model.forward(batch, pool).shape == (3, model.vocab_size)
