"""Reading the two config forms: Hugging Face names become flat names; what this family does not have is refused."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.engine.loading import ModelError


class ConfigError(ModelError):
    """The config is not one of this family; the message names the field and the rule."""


_TEXT_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_experts_per_tok": "n_activated_experts",
    "routed_scaling_factor": "route_scale",
    "rms_norm_eps": "norm_eps",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
    "num_nextn_predict_layers": "n_mtp_layers",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}
_TOP_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")

# What the forward pass takes for granted; a config that says otherwise is another model (spec §1.1).
_FIXED_TEXT: dict[str, object] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_FIXED_FLAT: dict[str, object] = {"n_shared_experts": 1, "score_func": "sqrtsoftplus", "norm_topk_prob": True}
_QUANTISATION: dict[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def flatten(values: Mapping[str, object]) -> dict[str, object]:
    """Either form → flat names. Raises ConfigError for another architecture, quantisation or fixed option."""
    if "text_config" not in values:
        if "architectures" in values or "model_type" in values or "dim" not in values:
            raise ConfigError(
                f"architectures {values.get('architectures')} is not DeepseekV41ForCausalLM with a text_config; "
                "choose a folder of this family"
            )
        _check_fixed(values, _FIXED_FLAT)
        return dict(values)
    if values.get("architectures") != ["DeepseekV41ForCausalLM"] or values.get("model_type") != "deepseek_v41":
        raise ConfigError(
            f"architectures {values.get('architectures')}, model_type {values.get('model_type')!r}: "
            "only DeepseekV41ForCausalLM / deepseek_v41 is served by this folder's code"
        )
    _check_quantisation(_part(values, "quantization_config"))
    if values.get("dtype", "bfloat16") != "bfloat16":
        raise ConfigError(f"dtype {values['dtype']!r}: the released activation dtype is bfloat16")
    text = _part(values, "text_config")
    _check_fixed(text, _FIXED_TEXT)
    flat = {_TEXT_NAMES.get(name, name): value for name, value in text.items()}
    flat |= _rope_scaling(text.get("rope_scaling"))
    return flat | {name: values[name] for name in _TOP_NAMES if name in values}


def _part(values: Mapping[str, object], name: str) -> dict[str, object]:
    part = values.get(name)
    if not isinstance(part, dict):
        raise ConfigError(f"config.json has no object {name!r}, which this family needs")
    return part


def _check_fixed(values: Mapping[str, object], fixed: Mapping[str, object]) -> None:
    for name, wanted in fixed.items():
        if values.get(name, wanted) != wanted:
            raise ConfigError(f"{name} = {values[name]!r} is not supported: this family has {wanted!r}")


def _check_quantisation(values: Mapping[str, object]) -> None:
    for name, wanted in _QUANTISATION.items():
        if values.get(name) != wanted:
            raise ConfigError(f"quantization_config.{name} = {values.get(name)!r}: only {wanted!r} is supported")


def _rope_scaling(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict) or value.get("rope_type", value.get("type")) != "yarn":
        raise ConfigError(f"rope_scaling {value!r}: only yarn or null is supported")
    return {
        "original_seq_len": value.get("original_max_position_embeddings"),
        "rope_factor": value.get("factor"),
        "beta_fast": value.get("beta_fast", 32),
        "beta_slow": value.get("beta_slow", 1),
    }


class Fields:
    """Typed reads of a flat config; a missing or wrongly typed field is a ConfigError."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"the config lacks {name}")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} = {value!r} must be an integer")
        return value

    def optional_integer(self, name: str) -> int | None:
        """None where the field is absent, null or −1."""
        value = self.integer(name, -1)
        return None if value < 0 else value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"the config lacks {name}")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} = {value!r} must be a number")
        return float(value)

    def integers(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A list of integers; a single integer is a list of one."""
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"the config lacks {name}")
            return default
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            raise ConfigError(f"{name} = {value!r} must be integers")
        return tuple(items)
