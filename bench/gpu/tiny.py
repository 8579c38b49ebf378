"""Small random models for the GPU script, and requests that reach every part of an engine. No tokenizer, no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file

from headrace.engine.models.deepseek_v41.make import make_tiny, plain_vocabulary, tiny_config
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.sampling_params import SamplingParams

V3_SIZES: dict[str, int] = {
    "vocab_size": 499,
    "hidden_size": 128,
    "intermediate_size": 320,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "kv_lora_rank": 48,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "qk_nope_head_dim": 32,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}
V3_CONFIG: dict[str, object] = V3_SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "float32",
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def make_v3(folder: Path, seed: int, changes: Mapping[str, int] = MappingProxyType({})) -> None:
    """A random DeepSeek-V3 folder: low-rank queries, one dense layer, grouped experts. Equal seeds give equal bytes.
    `changes`: sizes other than V3_SIZES.

    Scales are large enough that attention is peaked and tokens are routed apart.
    """
    size = V3_SIZES | dict(changes)
    hidden, vocab, heads = size["hidden_size"], size["vocab_size"], size["num_attention_heads"]
    nope, rope, value = size["qk_nope_head_dim"], size["qk_rope_head_dim"], size["v_head_dim"]
    rank, query_rank = size["kv_lora_rank"], size["q_lora_rank"]
    attention = {
        "q_a_proj": (query_rank, hidden),
        "q_a_layernorm": (query_rank,),
        "q_b_proj": (heads * (nope + rope), query_rank),
        "kv_a_proj_with_mqa": (rank + rope, hidden),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + value), rank),
        "o_proj": (hidden, heads * value),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(size["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if layer < size["first_k_dense_replace"]:
            shapes |= _ffn(f"{prefix}.mlp", hidden, size["intermediate_size"])
            continue
        shapes[f"{prefix}.mlp.gate.weight"] = (size["n_routed_experts"], hidden)
        shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (size["n_routed_experts"],)
        for expert in (*(f"experts.{index}" for index in range(size["n_routed_experts"])), "shared_experts"):
            shapes |= _ffn(f"{prefix}.mlp.{expert}", hidden, size["moe_intermediate_size"])
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if "norm" in name else noise * (0.1 if len(shape) > 1 else 0.02)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(V3_CONFIG | size, indent=1) + "\n", encoding="utf-8")


def _ffn(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def make_v41(folder: Path, seed: int) -> None:
    """V4.1-tiny: the spec's TINY sizes, a vocabulary of 499 without a tokenizer."""
    vocabulary = plain_vocabulary(499, 347)
    make_tiny(folder, seed, tiny_config(vocabulary), vocabulary.token_map)


def prompt_of(length: int, seed: int, first: Sequence[int] = ()) -> tuple[int, ...]:
    """Ids that start with `first`; none of them is an end, a pad or an image id."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 480, (max(length - len(first), 0),), generator=generator).tolist()
    return (*first, *ids)[:length]


GREEDY = SamplingParams(temperature=0.0, logprobs=2)
"""The two best log-probabilities tell how narrowly a token was chosen."""
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


def request(
    name: str, prompt: tuple[int, ...], tokens: int, *, sampling: SamplingParams = GREEDY, n: int = 1
) -> EngineRequest:
    return EngineRequest(
        key=RequestKey(name, 1),
        prompt_ids=prompt,
        key_root=bytes(32),
        sampling=sampling,
        seed=7,
        n=n,
        max_tokens=tokens,
        ignore_eos=True,
    )


def mixed_requests(longest: int, tokens: int) -> list[EngineRequest]:
    """Short and long prompts, shared prefixes, seeded samples, n = 2."""
    shared = prompt_of(longest, 1)
    return [
        request("one", prompt_of(1, 2), tokens),
        request("short", prompt_of(17, 3), tokens),
        request("long", shared, tokens),
        request("shared", prompt_of(longest + 21, 4, shared[: longest * 3 // 4]), tokens),
        request("again", shared, tokens),
        request("sampled", prompt_of(longest // 2, 5), tokens, sampling=SAMPLED),
        request("two", prompt_of(longest // 3, 6), tokens, sampling=SAMPLED, n=2),
    ]
