"""The config: both file forms, derived layer kinds of the published model, rules of spec §1.2, refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.golden_harness.folder import golden_folder
from headrace.engine.loading import ModelError
from headrace.engine.models.deepseek_v41.config import V41Config
from headrace.engine.models.deepseek_v41.make import plain_vocabulary, tiny_config
from headrace.engine.models.deepseek_v41.model import layout_of
from headrace.engine.models.deepseek_v41.parse import parse_config

CHECKPOINT = golden_folder() / "ckpt_tiny"

PUBLISHED: dict[str, object] = {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "swiglu_limit": 10.0,
    "max_position_embeddings": 1048576,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_vocab_size": 16000000,
    "num_nextn_predict_layers": 3,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}


def published() -> V41Config:
    return parse_config(tiny_config(plain_vocabulary(129280, 99092), PUBLISHED))


def tiny(**text: object) -> dict[str, Any]:
    return copy.deepcopy(tiny_config(plain_vocabulary(400, 300), text))


def test_published_layer_kinds() -> None:
    """Spec §1.3: who owns KV, selection and candidates, and which layers are consumers."""
    config = published()
    kinds = config.layers
    assert config.first_consumer == 20
    assert [k.index for k in kinds if k.owns_kv] == [2, 8, 14, 20]
    assert [k.index for k in kinds if k.owns_selection] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [k.index for k in kinds if k.makes_candidates] == [20]
    assert [k.index for k in kinds if k.searches_candidates] == [24, 28, 32, 36]
    assert [(k.index, k.engram) for k in kinds if k.engram is not None] == [(1, 0), (14, 1)]
    assert [kinds[i].kv_source for i in (0, 7, 13, 19, 39)] == [None, 2, 8, 14, 20]
    assert [kinds[i].index_source for i in (1, 7, 23, 39)] == [None, 2, 20, 36]
    assert config.rope_of(1).original_seq_len == 0
    assert config.rope_of(2).base == 160000.0
    assert config.lookback_tokens == 3
    assert config.supports_replay


def test_published_layout_bytes() -> None:
    """Spec §17: block, snapshot and slot of the published config."""
    layout = layout_of(published(), entry_format="native", block_tokens=128, backtracking=6)
    assert (layout.block_bytes, layout.snapshot_bytes, layout.slot_bytes) == (114048, 1415040, 3128928)


def test_nested_and_flat_forms_agree() -> None:
    nested, flat = (parse_config(json.loads((CHECKPOINT / f"{n}.json").read_text())) for n in ("config", "config_flat"))
    assert replace(flat, max_positions=nested.max_positions) == nested
    made = parse_config(tiny_config(plain_vocabulary(400, 300), {"dspark_noise_token_id": 390}))
    assert made == nested


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(architectures=["DeepseekV3ForCausalLM"]), "DeepseekV41ForCausalLM"),
        (lambda c: c.update(model_type="deepseek_v4"), "deepseek_v4"),
        (lambda c: c.update(dtype="float16"), "bfloat16"),
        (lambda c: c.pop("quantization_config"), "quantization_config"),
        (lambda c: c["quantization_config"].update(weight_block_size=[128, 128]), "weight_block_size"),
        (lambda c: c["quantization_config"].update(expert_dtype="fp8"), "expert_dtype"),
        (lambda c: c["text_config"].update(scoring_func="sigmoid"), "scoring_func"),
        (lambda c: c["text_config"].update(n_shared_experts=2), "n_shared_experts"),
        (lambda c: c["text_config"].update(rope_scaling={"rope_type": "linear", "factor": 2}), "rope_scaling"),
        (lambda c: c["text_config"].pop("index_topk"), "index_topk"),
        (lambda c: c["text_config"].update(index_topk="many"), "index_topk"),
        (lambda c: c["text_config"].update(compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1]), "compress_ratios needs 9"),
        (lambda c: c["text_config"].update(compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1]), "draft layers"),
        (lambda c: c["text_config"].update(kv_source_layer_ids=[2, 4]), "same compress ratio"),
        (lambda c: c["text_config"].update(index_source_layer_ids=[2, 5, 7]), "inside the same kv segment"),
        (lambda c: c["text_config"].update(index_source_layer_ids=[0, 2, 4, 5]), "r must be > 0"),
        (lambda c: c["text_config"].update(candidate_source_layer_id=6), "must be an index source"),
        (lambda c: c["text_config"].update(candidate_source_layer_id=2), "share the source's ratio"),
        (lambda c: c["text_config"].update(engram_layer_ids=[1, 5]), "producers"),
        (lambda c: c["text_config"].update(engram_num_embeddings=[660]), "one engram_num_embeddings"),
        (lambda c: c["text_config"].update(dspark_target_layer_ids=[4, 5]), "both sides"),
        (lambda c: c["text_config"].update(qk_rope_head_dim=128), "exceeds"),
        (lambda c: c["text_config"].update(o_groups=3), "o_groups"),
    ],
)
def test_what_is_refused(change: Callable[[dict[str, Any]], object], message: str) -> None:
    """Other models and broken rules are refused at the border, with the field's name."""
    config = tiny()
    change(config)
    with pytest.raises(ModelError, match=message):
        parse_config(config)


def test_candidates_may_be_absent() -> None:
    for value in (None, -1):
        assert parse_config(tiny(candidate_source_layer_id=value)).candidate_source_layer is None


def test_a_later_source_has_no_replay() -> None:
    config = parse_config(tiny(kv_source_layer_ids=[2, 4, 5, 7]))
    assert not config.supports_replay
