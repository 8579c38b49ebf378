"""A folder becomes a model, or the reason why not names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from headrace.engine.loading import ModelError, ModelSettings, family_of, folder_dtype, load_model
from headrace.engine.models.deepseek_v3.config import parse_config

TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def test_settings_know_their_keys() -> None:
    """An unknown key is an error, not a silent default."""
    with pytest.raises(ValidationError):
        TypeAdapter(ModelSettings).validate_python({"dytpe": "float32"})


def test_numeric_identity_names_what_changes_bytes() -> None:
    """Part of model_fp: two settings that give different rows have different strings."""
    base = ModelSettings()
    seen = {
        base.numeric_identity(torch.float32),
        base.numeric_identity(torch.bfloat16),
        ModelSettings(batch_invariant=True).numeric_identity(torch.float32),
        ModelSettings(entry_format="float32").numeric_identity(torch.bfloat16),
        ModelSettings(numeric_mode="full").numeric_identity(torch.bfloat16),
    }
    assert len(seen) == 5
    assert ModelSettings(dtype="bfloat16").numeric_identity(torch.float32) == base.numeric_identity(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"hidden_size": True}, "hidden_size"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"scoring_func": "softmax"}, "sigmoid"),
        ({"rope_scaling": {"type": "linear"}}, "linear"),
        ({"rope_parameters": {"rope_type": "explicit", "inverse_frequencies": [1.0]}}, "list of 4"),
        ({"eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_a_bad_config_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(TINY | change)


def test_rope_of_older_and_newer_spelling_is_one() -> None:
    """rope_theta + rope_scaling (DeepSeek's own folders) and rope_parameters (transformers 5) say the same."""
    yarn = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    old = parse_config(TINY | {"rope_theta": 10000, "rope_scaling": {"type": "yarn", **yarn}})
    new = parse_config(TINY | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **yarn}})
    assert old == new
    assert old.rope.attention_factor == 1.0
    assert old.softmax_scale > parse_config(TINY).softmax_scale


def test_explicit_frequencies_are_taken_as_they_are() -> None:
    rope = {"rope_type": "explicit", "inverse_frequencies": [1, 0.5, 1, 0.5]}
    config = parse_config(TINY | {"rope_parameters": rope})
    assert config.rope.inverse_frequencies == (1.0, 0.5, 1.0, 0.5)


def test_folder_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2"]}))
    with pytest.raises(ModelError, match="DeepseekV3ForCausalLM"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="float16"):
        folder_dtype({"dtype": "float16"})
    assert folder_dtype({"torch_dtype": "bfloat16"}) == torch.bfloat16
    assert family_of({"architectures": ["DeepseekV3ForCausalLM"]}).endswith("deepseek_v3.model")
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"architectures": ["DeepseekV3ForCausalLM"]}))
    with pytest.raises(ModelError, match="batch_invariant"):
        load_model(tmp_path, ModelSettings(dtype="bfloat16", batch_invariant=True))
    with pytest.raises(ModelError, match="numeric_mode"):
        load_model(tmp_path, ModelSettings(numeric_mode="full"))
