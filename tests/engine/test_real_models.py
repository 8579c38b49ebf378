"""L5 on real arithmetic: random tiny V3 and V4.1 in float32 batch_invariant mode, by every way through the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.messages import FinishReason
from headrace.engine.model import Model
from headrace.engine.models.deepseek_v41.make import make_tiny, plain_vocabulary, tiny_config
from headrace.engine.offline import OfflineEngine
from headrace.engine.request import ImageInput
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.settings import EngineSettings
from headrace.kvcache.pool import KVPool

BLOCK = 16
EXACT = {"dtype": "float32", "batch_invariant": True, "block_tokens": BLOCK}


def v3(folder: Path) -> Model:
    """MLA with low-rank queries, grouped MoE."""
    transformers = pytest.importorskip("transformers", reason="transformers writes the random folder (extra dev)")
    config = transformers.DeepseekV3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=8,
        qk_nope_head_dim=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=512,
        num_mtp_layers=0,
    )
    oracle = transformers.DeepseekV3ForCausalLM(config).float().eval()
    for name, tensor in oracle.state_dict().items():
        noise = torch.randn(tensor.shape) * 0.3
        tensor.copy_(1 + noise if "norm" in name else noise)
    oracle.save_pretrained(folder)
    return load_model(folder, ModelSettings(**EXACT))


def v41(folder: Path) -> Model:
    """Every layer kind of the spec: sliding windows, compressed sources and consumers, indexers, Engram, images."""
    vocabulary = plain_vocabulary(97, 61)
    small = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "sliding_window": 6,
        "index_head_dim": 32,
    }
    make_tiny(folder, 1, tiny_config(vocabulary, small), vocabulary.token_map)
    return load_model(folder, ModelSettings(**EXACT, numeric_mode="noquant", entry_format="float32", backtracking=6))


@pytest.fixture(scope="module", params=[v3, v41], ids=["v3", "v41"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: Model = request.param(tmp_path_factory.mktemp("model"))
    return model


def requests_for(kit: Any, model: Model) -> list[Any]:
    """Shared prefixes, several lengths, greedy and sampled, n = 2, and an image where the model takes one."""
    sampled = SamplingParams(temperature=0.8, top_p=0.95)
    shared = [(index * 7 + 3) % 89 for index in range(70)]
    lengths = {"g0": (shared[:5], 8), "g1": (shared[:33], 22), "g2": ([*shared, 5, 6, 7], 12)}
    requests = [kit.request(name, prompt, max_tokens=tokens) for name, (prompt, tokens) in lengths.items()]
    requests.append(kit.request("s", shared[:40], max_tokens=12, n=2, sampling=sampled))
    if model.image_token_id is not None:
        rows = torch.randn(20, model.hidden_size, generator=torch.Generator().manual_seed(5))
        ids = [*shared[:9], *[model.image_token_id] * 20, *shared[9:30]]
        image = ImageInput(9, 20, bytes([7]) * 32, rows)
        requests.append(kit.request("i", ids, max_tokens=8, images=(image,)))
    return requests


def tokens_of(kit: Any, model: Model, rows: int, **settings: Any) -> tuple[dict[str, list[list[int]]], Any]:
    options = EngineSettings(**{"max_sequences": 6, "max_batched_tokens": 256, **settings})
    pool = KVPool(model.layout, num_rows=rows + 1, num_slots=7, num_snapshots=32)
    engine = OfflineEngine(model, options, pool=pool)
    completions = engine.generate(requests_for(kit, model))
    assert engine.engine.integrity(idle=True) == ()
    for completion in completions:
        assert all(choice.reason is FinishReason.LENGTH for choice in completion.choices), completion
    tokens = {
        completion.request.key.request_id: [choice.token_ids for choice in completion.choices]
        for completion in completions
    }
    return tokens, engine.engine


@pytest.fixture(scope="module")
def expected(kit: Any, real: Model) -> dict[str, list[list[int]]]:
    """Two choices at a time at most, whole prompts, nothing reused."""
    return tokens_of(kit, real, 100, max_sequences=2, prefix_reuse=False)[0]


def test_batched_chunked_and_reused(kit: Any, real: Model, expected: dict[str, list[list[int]]]) -> None:
    """L5: batched = chunked = prefix hit = alone."""
    streams = [tuple(tokens) for choices in expected.values() for tokens in choices]
    assert len(set(streams)) == len(streams)
    got, _ = tokens_of(kit, real, 100, max_batched_tokens=19)
    assert got == expected


@pytest.mark.parametrize("spill_bytes", [0, 64 << 20], ids=["recomputed", "spilled"])
def test_preempted(kit: Any, real: Model, expected: dict[str, list[list[int]]], spill_bytes: int) -> None:
    """L5: preempted and resumed by copying back, or recomputed with its N₀."""
    got, engine = tokens_of(kit, real, 7, max_batched_tokens=64, spill_bytes=spill_bytes)
    assert got == expected
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("delivered", [1, 6, 19], ids=["1", "W", "K+1"])
def test_continued_elsewhere(kit: Any, real: Model, expected: dict[str, list[list[int]]], delivered: int) -> None:
    """L5, L15: prompt and delivered tokens on another worker, with the prompt's N₀, give the rest of the stream."""
    request = next(request for request in requests_for(kit, real) if request.key.request_id == "g1")
    tokens = expected["g1"][0]
    resumed = replace(request, delivered=(tuple(tokens[:delivered]),))
    pool = KVPool(real.layout, num_rows=20, num_slots=7, num_snapshots=32)
    engine = OfflineEngine(real, EngineSettings(max_sequences=6, max_batched_tokens=64), pool=pool)
    (completion,) = engine.generate([resumed])
    assert completion.choices[0].token_ids == tokens[delivered:]
    assert completion.counts.recomputed == delivered
