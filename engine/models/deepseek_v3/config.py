"""The DeepSeek-V3 architecture's numbers, read and checked from a Hugging Face config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch

from headrace.engine.loading import ModelError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of qk_rope_head_dim lanes."""

    inverse_frequencies: tuple[float, ...]
    """[rope / 2], as float32 will hold them; YaRN's blend is applied already."""
    attention_factor: float
    """cos and sin are multiplied by it (YaRN: mscale(factor, mscale) / mscale(factor, mscale_all_dim))."""
    interleaved: bool
    """Pairs (0, 1), (2, 3) … when true; (i, i + rope / 2) when false."""


@dataclass(frozen=True)
class MoEConfig:
    """Routed and shared experts of layers ≥ first_k_dense_replace."""

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared: int
    num_groups: int
    top_groups: int
    normalize: bool
    scale: float

    @property
    def routes_to_all(self) -> bool:
        """Every token goes to every expert: the layer is one wide FFN (SmolLM2's `split`)."""
        return self.top_k == self.num_experts


@dataclass(frozen=True)
class DeepseekV3Config:
    """One text model; names as in Hugging Face's DeepseekV3Config."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    first_dense: int
    """Layers below it have a dense FFN (first_k_dense_replace)."""
    moe: MoEConfig | None
    """None when no layer is MoE."""
    rms_eps: float
    lora_rms_eps: float
    """Of q_a_layernorm and kv_a_layernorm: 1e-6 in every public implementation, whatever rms_norm_eps says."""
    attention_bias: bool
    """Of q_a, kv_a and o projections."""
    kv_a_norm: bool
    """Headrace's own key ``kv_a_layernorm``: false leaves the latent unnormalised (re-expressed models)."""
    tie_embeddings: bool
    max_positions: int
    softmax_scale: float
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Elements per token and layer of a pool row: kv_lora ‖ rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.first_dense


class _Reader:
    """Typed access to one JSON object; every complaint names the key."""

    def __init__(self, fields: dict[str, object], where: str = "config.json") -> None:
        self.fields = fields
        self.where = where

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.fields.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ModelError(f"{self.where}: {key} must be an integer ≥ {minimum}, not {value!r}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.fields.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.fields.get(key)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ModelError(f"{self.where}: {key} must be a finite number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.fields.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} must be true or false, not {value!r}")
        return value


def parse_config(fields: dict[str, object]) -> DeepseekV3Config:
    """Read config.json of a ``DeepseekV3ForCausalLM`` folder, with ``rope_scaling`` (old) or ``rope_parameters`` (new).

    Raises:
        ModelError: a value is missing, out of range, or not implemented; the message names the key.
    """
    read = _Reader(fields)
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act {fields['hidden_act']!r} is not implemented, only silu")
    if fields.get("quantization_config") is not None:
        raise ModelError(
            "config.json: quantization_config is not implemented for DeepSeek-V3; convert to bfloat16 first"
        )
    num_layers = read.integer("num_hidden_layers")
    first_dense = read.integer("first_k_dense_replace", 3, minimum=0)
    rope_dim = read.integer("qk_rope_head_dim")
    nope_dim = read.integer("qk_nope_head_dim", minimum=0)
    if rope_dim % 2:
        raise ModelError(f"config.json: qk_rope_head_dim {rope_dim} must be even")
    max_positions = read.integer("max_position_embeddings", 4096)
    rope, mscale = _parse_rope(fields, rope_dim, max_positions)
    return DeepseekV3Config(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=read.integer("num_attention_heads"),
        q_lora_rank=read.optional_integer("q_lora_rank"),
        kv_lora_rank=read.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=read.integer("v_head_dim"),
        intermediate_size=read.integer("intermediate_size"),
        first_dense=first_dense,
        moe=_parse_moe(read) if first_dense < num_layers else None,
        rms_eps=read.number("rms_norm_eps", 1e-6),
        lora_rms_eps=1e-6,
        attention_bias=read.flag("attention_bias", False),
        kv_a_norm=read.flag("kv_a_layernorm", True),
        tie_embeddings=read.flag("tie_word_embeddings", False),
        max_positions=max_positions,
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * mscale * mscale,
        rope=rope,
        eos_token_ids=_parse_eos(fields),
    )


def _parse_moe(read: _Reader) -> MoEConfig:
    moe = MoEConfig(
        num_experts=read.integer("n_routed_experts"),
        top_k=read.integer("num_experts_per_tok"),
        intermediate_size=read.integer("moe_intermediate_size"),
        num_shared=read.integer("n_shared_experts", 0, minimum=0),
        num_groups=read.integer("n_group", 1),
        top_groups=read.integer("topk_group", 1),
        normalize=read.flag("norm_topk_prob", True),
        scale=read.number("routed_scaling_factor", 1.0),
    )
    if moe.num_experts % moe.num_groups:
        raise ModelError(f"config.json: n_routed_experts {moe.num_experts} is no multiple of n_group {moe.num_groups}")
    if moe.top_groups > moe.num_groups:
        raise ModelError(f"config.json: topk_group {moe.top_groups} exceeds n_group {moe.num_groups}")
    if moe.top_k > moe.top_groups * (moe.num_experts // moe.num_groups):
        raise ModelError(f"config.json: num_experts_per_tok {moe.top_k} exceeds the experts of {moe.top_groups} groups")
    method, scoring = read.fields.get("topk_method", "noaux_tc"), read.fields.get("scoring_func", "sigmoid")
    if method != "noaux_tc" or scoring != "sigmoid":
        raise ModelError(
            f"config.json: only noaux_tc routing over sigmoid scores is implemented, not {method}/{scoring}"
        )
    return moe


def _parse_eos(fields: dict[str, object]) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in values):
        raise ModelError(f"config.json: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(cast("list[int]", values))


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature: 0.1 · mscale · ln(factor) + 1 (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _parse_rope(fields: dict[str, object], dim: int, max_positions: int) -> tuple[RopeConfig, float]:
    """Rope and the factor that enters the softmax scale squared."""
    merged: dict[str, object] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = fields.get(key)
        if part is not None and not isinstance(part, dict):
            raise ModelError(f"config.json: {key} must be an object")
        merged |= cast("dict[str, object]", part or {})
    read = _Reader(merged, "config.json rope parameters")
    kind = merged.get("rope_type", merged.get("type", "default"))
    interleaved = _Reader(fields).flag("rope_interleave", True)
    if kind == "explicit":
        return RopeConfig(_explicit_frequencies(merged, dim), 1.0, interleaved), 1.0
    theta = read.number("rope_theta", _Reader(fields).number("rope_theta", 10_000.0))
    if theta <= 1:
        raise ModelError(f"config.json: rope_theta {theta} must exceed 1")
    # In float32 like every public implementation: at position 10⁵ a float64 table would turn by another 10⁻² radians.
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if kind == "default":
        return RopeConfig(tuple(plain.tolist()), 1.0, interleaved), 1.0
    if kind != "yarn":
        raise ModelError(f"config.json: rope type {kind!r} is not implemented; known are default, yarn, explicit")
    original = read.integer("original_max_position_embeddings", max_positions)
    factor = read.number("factor", max_positions / original)
    slow, fast = read.number("beta_slow", 1.0), read.number("beta_fast", 32.0)
    ramp = _yarn_ramp(dim, theta, original, fast, slow, read.flag("truncate", True))
    frequencies = tuple((plain / factor * ramp + plain * (1 - ramp)).tolist())
    all_dim, one = read.number("mscale_all_dim", 0.0), read.number("mscale", 0.0)
    default = _mscale(factor, one) / _mscale(factor, all_dim) if one and all_dim else _mscale(factor, 1.0)
    softmax = _mscale(factor, all_dim) if all_dim else 1.0
    return RopeConfig(frequencies, read.number("attention_factor", default), interleaved), softmax


def _yarn_ramp(dim: int, theta: float, original: int, fast: float, slow: float, truncate: bool) -> torch.Tensor:
    """Share of interpolation per frequency: 0 above ``fast`` rotations over the original context, 1 below ``slow``."""

    def lane(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = lane(fast), lane(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _explicit_frequencies(rope: dict[str, object], dim: int) -> tuple[float, ...]:
    values = rope.get("inverse_frequencies")
    if not isinstance(values, list) or len(values) != dim // 2 or not all(isinstance(v, int | float) for v in values):
        raise ModelError(f"config.json: rope type explicit needs inverse_frequencies, a list of {dim // 2} numbers")
    return tuple(float(value) for value in values)
