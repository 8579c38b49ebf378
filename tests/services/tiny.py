"""Tiny model folders with seeded random weights, made without transformers; and requests for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.engine.text.byte_tokenizer import make_byte_tokenizer

V41_FOLDER = Path(__file__).parents[1] / "golden_data" / "v41" / "ckpt_tiny"
BLOCK = 16


def make_v3(folder: Path, seed: int = 3) -> Path:
    """A DeepSeek-V3 of three layers, the last two with experts, over the byte tokenizer."""
    tokenizer = make_byte_tokenizer()
    hidden, heads, nope, rope, value, latent, width, experts = 48, 3, 16, 8, 12, 20, 24, 4
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 80,
        "moe_intermediate_size": width,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": 1,
        "n_routed_experts": experts,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": latent,
        "q_lora_rank": None,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "qk_nope_head_dim": nope,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "dtype": "float32",
        "tie_word_embeddings": False,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (tokenizer.vocab_size, hidden),
        "lm_head.weight": (tokenizer.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(3):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (heads * (nope + rope), hidden),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
            f"{at}.self_attn.kv_a_layernorm.weight": (latent,),
            f"{at}.self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * value),
        }
        blocks = {"mlp": 80} if layer == 0 else {"mlp.shared_experts": width}
        if layer > 0:
            blocks |= {f"mlp.experts.{expert}": width for expert in range(experts)}
            shapes |= {
                f"{at}.mlp.gate.weight": (experts, hidden),
                f"{at}.mlp.gate.e_score_correction_bias": (experts,),
            }
        for name, inner in blocks.items():
            shapes |= {
                f"{at}.{name}.gate_proj.weight": (inner, hidden),
                f"{at}.{name}.up_proj.weight": (inner, hidden),
                f"{at}.{name}.down_proj.weight": (hidden, inner),
            }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.serialized, encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_v41(folder: Path) -> Path:
    """The golden set's tiny DeepSeek-V4.1."""
    shutil.copytree(V41_FOLDER, folder)
    return folder
