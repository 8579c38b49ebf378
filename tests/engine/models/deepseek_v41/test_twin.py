"""Every layer layout against the plain twin that is written from the spec's text alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.golden_harness.serving import admit, prefill
from headrace.engine.models.deepseek_v41.model import DeepseekV41
from headrace.kvcache.pool import KVPool
from tests.engine.models.deepseek_v41.twin import Twin

LAYOUTS = ["small", "ratio 4, no candidates, no drafts", "no consumers, no Engram"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("keep_from", "images"), [(0, False), (17, True)], ids=["text", "replay and image"])
def test_model_against_twin(
    model_of: Callable[..., DeepseekV41],
    folder_of: Callable[[str], Path],
    layout: str,
    keep_from: int,
    images: bool,
) -> None:
    """float32 through pool and slots against a float64 recompute without caches."""
    model = model_of(layout)
    ids = [(17 * i + 5) % 83 for i in range(29)]
    image = [images and 6 <= p < 15 for p in range(len(ids))]
    embeddings = torch.randn(9, model.hidden_size, generator=torch.Generator().manual_seed(0)) if images else None
    pool = KVPool(model.layout, num_rows=6, num_slots=2)
    sequence = admit(pool, ids, capacity=len(ids), keep_from=keep_from, image=image, embeddings=embeddings)
    got = prefill(model, pool, sequence, 6, every_row=True)
    expected = Twin(folder_of(layout)).logits(ids, keep_from, image, embeddings)[-got.shape[0] :]
    assert got.shape[0] == len(ids) - keep_from
    torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=1e-4)
