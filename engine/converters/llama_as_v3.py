"""A llama model with grouped queries, written as a DeepSeek-V3 model with the same function (spec/smollm2_as_v3.md).

With g KV heads of width d, half-split rope, and h query heads:

- rope key (g·d lanes): the KV heads' keys side by side, all first halves, then all second halves. A query head is zero
  outside its group's lanes. V3 divides scores by √(nope + rope) instead of √d, so live query lanes are scaled by
  √((nope + rope) / d).
- latent (kv_lora_rank lanes): the KV heads' values, then pad lanes; kv_b_proj picks the group's lanes for each head. No
  kv_a_layernorm (``kv_a_layernorm: false``): it would rescale values.
- no key has a position-free part: the qk_nope_head_dim lanes are zero, in q and in kv_b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from headrace.engine.converters.folder import PlannedTensor
from headrace.engine.converters.gguf_llama import LlamaFile, LlamaNumbers

LATENT_MULTIPLE = 64
"""kv_lora_rank is rounded up to it, as kernels for MLA want it: 192 value lanes become 256."""


@dataclass(frozen=True)
class MoEShape:
    """How dense layers (all but the first) become MoE layers of the same function."""

    kind: Literal["split", "copy"]
    """split: the FFN cut into experts that every token runs. copy: identical experts behind a random router; whatever
    it chooses the answer is the same, so a wrong expert byte or a lost token shows."""
    experts: int = 8
    top_k: int | None = None
    """copy: experts per token, 2 unless given. split: all of them."""

    def chosen(self) -> int:
        return self.experts if self.kind == "split" else self.top_k or 2


def _latent_rank(numbers: LlamaNumbers) -> int:
    values = numbers.kv_heads * numbers.head_dim
    # At least one full pad block: FlashMLA-style kernels and the 448-value row of spec/protocol.md count on 256.
    return -(-(values + 1) // LATENT_MULTIPLE) * LATENT_MULTIPLE


def v3_config(llama: LlamaFile, moe: MoEShape, dtype: str) -> dict[str, object]:
    """config.json of the re-expressed model."""
    numbers = llama.numbers
    if moe.kind == "split" and numbers.intermediate % moe.experts:
        raise ValueError(f"an FFN of {numbers.intermediate} cannot be split into {moe.experts} experts")
    split = moe.kind == "split"
    exponents = torch.arange(0, numbers.head_dim, 2, dtype=torch.float32) / numbers.head_dim
    frequencies = (1.0 / numbers.rope_theta**exponents).tolist()
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": dtype,
        "vocab_size": numbers.vocab,
        "hidden_size": numbers.hidden,
        "intermediate_size": numbers.intermediate,
        "moe_intermediate_size": numbers.intermediate // moe.experts if split else numbers.intermediate,
        "num_hidden_layers": numbers.layers,
        "num_attention_heads": numbers.heads,
        "num_key_value_heads": numbers.heads,
        "n_shared_experts": 0,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.chosen(),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(moe.experts) if split else 1.0,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": _latent_rank(numbers),
        "kv_a_layernorm": False,
        "qk_nope_head_dim": numbers.head_dim,
        "qk_rope_head_dim": numbers.kv_heads * numbers.head_dim,
        "v_head_dim": numbers.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": numbers.rms_eps,
        "attention_bias": False,
        "tie_word_embeddings": llama.tied,
        "max_position_embeddings": numbers.context,
        "rope_interleave": False,
        "rope_parameters": {"rope_type": "explicit", "inverse_frequencies": frequencies * numbers.kv_heads},
        "bos_token_id": numbers.bos,
        "eos_token_id": numbers.eos,
    }


def plan_tensors(llama: LlamaFile, moe: MoEShape, dtype: torch.dtype) -> list[PlannedTensor]:
    """All tensors in the order they are written; neighbours are those that one matrix product reads together."""
    numbers = llama.numbers
    hidden, inner = numbers.hidden, numbers.intermediate
    query = numbers.heads * (numbers.head_dim * (1 + numbers.kv_heads))
    rank, rope = _latent_rank(numbers), numbers.kv_heads * numbers.head_dim
    planned: list[PlannedTensor] = []

    def add(name: str, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> None:
        planned.append(PlannedTensor(name, shape, dtype, make))

    def source(name: str) -> Callable[[], torch.Tensor]:
        return partial(llama.tensor, name)

    add("model.embed_tokens.weight", (numbers.vocab, hidden), source("token_embd.weight"))
    if not llama.tied:
        add("lm_head.weight", (numbers.vocab, hidden), source("output.weight"))
    add("model.norm.weight", (hidden,), source("output_norm.weight"))
    for layer in range(numbers.layers):
        block, prefix = f"blk.{layer}", f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        add(f"{prefix}.input_layernorm.weight", (hidden,), source(f"{block}.attn_norm.weight"))
        add(f"{attention}.q_proj.weight", (query, hidden), partial(_queries, llama, block))
        add(f"{attention}.kv_a_proj_with_mqa.weight", (rank + rope, hidden), partial(_keys_and_values, llama, block))
        add(
            f"{attention}.kv_b_proj.weight",
            (numbers.heads * 2 * numbers.head_dim, rank),
            partial(_value_selector, numbers),
        )
        add(
            f"{attention}.o_proj.weight",
            (hidden, numbers.heads * numbers.head_dim),
            source(f"{block}.attn_output.weight"),
        )
        add(f"{prefix}.post_attention_layernorm.weight", (hidden,), source(f"{block}.ffn_norm.weight"))
        mlp = f"{prefix}.mlp"
        if layer == 0:
            add(f"{mlp}.gate_proj.weight", (inner, hidden), source(f"{block}.ffn_gate.weight"))
            add(f"{mlp}.up_proj.weight", (inner, hidden), source(f"{block}.ffn_up.weight"))
            add(f"{mlp}.down_proj.weight", (hidden, inner), source(f"{block}.ffn_down.weight"))
            continue
        add(f"{mlp}.gate.weight", (moe.experts, hidden), partial(_router, moe, layer, hidden))
        add(f"{mlp}.gate.e_score_correction_bias", (moe.experts,), partial(torch.zeros, moe.experts))
        width = inner // moe.experts if moe.kind == "split" else inner
        for kind, tensor, dim in (("gate_proj", "ffn_gate", 0), ("up_proj", "ffn_up", 0), ("down_proj", "ffn_down", 1)):
            for expert in range(moe.experts):
                part = slice(expert * width, (expert + 1) * width) if moe.kind == "split" else slice(None)
                shape = (width, hidden) if dim == 0 else (hidden, width)
                make = partial(_part, llama, f"{block}.{tensor}.weight", part, dim)
                add(f"{mlp}.experts.{expert}.{kind}.weight", shape, make)
    return planned


def _part(llama: LlamaFile, name: str, part: slice, dim: int) -> torch.Tensor:
    tensor = llama.tensor(name)
    return tensor[part] if dim == 0 else tensor[:, part]


def _lanes(numbers: LlamaNumbers, group: int) -> tuple[slice, slice]:
    """The rope lanes of a KV head: its first half and its second half."""
    half = numbers.head_dim // 2
    first = group * half
    second = numbers.kv_heads * half + group * half
    return slice(first, first + half), slice(second, second + half)


def _queries(llama: LlamaFile, block: str) -> torch.Tensor:
    numbers = llama.numbers
    half = numbers.head_dim // 2
    source = llama.tensor(f"{block}.attn_q.weight").view(numbers.heads, numbers.head_dim, numbers.hidden)
    rope = numbers.kv_heads * numbers.head_dim
    scale = math.sqrt((numbers.head_dim + rope) / numbers.head_dim)
    out = torch.zeros(numbers.heads, numbers.head_dim + rope, numbers.hidden)
    for head in range(numbers.heads):
        first, second = _lanes(numbers, head * numbers.kv_heads // numbers.heads)
        lanes = out[head, numbers.head_dim :]
        lanes[first] = source[head, :half] * scale
        lanes[second] = source[head, half:] * scale
    return out.flatten(0, 1)


def _keys_and_values(llama: LlamaFile, block: str) -> torch.Tensor:
    numbers = llama.numbers
    half = numbers.head_dim // 2
    rank, values = _latent_rank(numbers), numbers.kv_heads * numbers.head_dim
    keys = llama.tensor(f"{block}.attn_k.weight").view(numbers.kv_heads, numbers.head_dim, numbers.hidden)
    out = torch.zeros(rank + values, numbers.hidden)
    out[:values] = llama.tensor(f"{block}.attn_v.weight")
    for group in range(numbers.kv_heads):
        first, second = _lanes(numbers, group)
        out[rank:][first] = keys[group, :half]
        out[rank:][second] = keys[group, half:]
    return out


def _value_selector(numbers: LlamaNumbers) -> torch.Tensor:
    width = numbers.head_dim
    out = torch.zeros(numbers.heads, 2 * width, _latent_rank(numbers))
    for head in range(numbers.heads):
        first = head * numbers.kv_heads // numbers.heads * width
        out[head, width:, first : first + width] = torch.eye(width)
    return out.flatten(0, 1)


def _router(moe: MoEShape, layer: int, hidden: int) -> torch.Tensor:
    """split: equal scores, so every expert weighs 1/n, times a scale of n. copy: anything; seeded by the layer."""
    if moe.kind == "split":
        return torch.zeros(moe.experts, hidden)
    return torch.randn(moe.experts, hidden, generator=torch.Generator().manual_seed(layer)) / math.sqrt(hidden)
