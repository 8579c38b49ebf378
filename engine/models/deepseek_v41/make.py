"""Making small V4.1 folders with seeded weights in the released tensor formats (spec §1.4, §2).

A made folder goes through every mechanism of the published model; its answers are noise. Sizes come from overrides of
the Hugging Face config, so that tests can run any layer layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from headrace.engine.loading import ModelError
from headrace.engine.models.deepseek_v41.config import V41Config
from headrace.engine.models.deepseek_v41.engram import TOKEN_MAP_FILE, TOKEN_MAP_TENSOR
from headrace.engine.models.deepseek_v41.make_weights import make_tensors
from headrace.engine.models.deepseek_v41.parse import parse_config
from headrace.kernels.reference.engram import engram_constants


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer gives a config."""

    size: int
    token_map: tuple[int, ...]
    """Compressed id of every id (spec §13); its distinct count is engram_compressed_vocab_size."""
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    noise_token_id: int | None = None
    """dspark_noise_token_id; the last id where none is given."""

    @property
    def compressed_size(self) -> int:
        return len(set(self.token_map))


def plain_vocabulary(size: int, compressed_size: int) -> Vocabulary:
    """A vocabulary without a tokenizer: id modulo the compressed size; the image id is the last one."""
    return Vocabulary(size, tuple(i % compressed_size for i in range(size)), image_token_id=size - 1)


def tiny_config(
    vocabulary: Vocabulary,
    text: Mapping[str, object] | None = None,
    vision: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """A Hugging Face config of the TINY sizes (spec §1.4), with fields of its text and vision parts replaced.

    ``engram_num_embeddings`` follows from the Engram sizes unless it is given.
    """
    noise = vocabulary.noise_token_id
    changed = (
        _TEXT
        | {
            "vocab_size": vocabulary.size,
            "engram_pad_token_id": vocabulary.pad_token_id,
            "engram_compressed_vocab_size": vocabulary.compressed_size,
            "dspark_noise_token_id": vocabulary.size - 1 if noise is None else noise,
        }
        | dict(text or {})
    )
    if "engram_num_embeddings" not in changed:
        changed["engram_num_embeddings"] = _table_rows(changed)
    config: dict[str, object] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": vocabulary.bos_token_id,
        "eos_token_id": vocabulary.eos_token_id,
        "pad_token_id": vocabulary.pad_token_id,
        "quantization_config": _QUANTISATION,
        "text_config": changed,
        "vision_config": _VISION | dict(vision or {}),
    }
    if vocabulary.image_token_id is not None:
        config["image_token_id"] = vocabulary.image_token_id
    return config


def make_tiny(folder: Path, seed: int, config: Mapping[str, object], token_map: Sequence[int]) -> V41Config:
    """Write config.json, model.safetensors, its index and the Engram token map into ``folder``.

    Equal arguments give equal bytes. The weights are written under another name and renamed, and config.json comes
    last, so an interrupted call leaves no folder that loads.

    Raises:
        ModelError: the config breaks a rule of spec §1.2, or has fewer ids than the token map.
    """
    parsed = parse_config(config)
    if len(token_map) > parsed.vocab_size:
        raise ModelError(f"the token map has {len(token_map)} ids, the vocabulary {parsed.vocab_size}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = make_tensors(parsed, config, seed)
    _write_tensors(folder / "model.safetensors", tensors)
    index = {
        "metadata": {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())},
        "weight_map": dict.fromkeys(sorted(tensors), "model.safetensors"),
    }
    _write_json(folder / "model.safetensors.index.json", index)
    _write_tensors(folder / TOKEN_MAP_FILE, {TOKEN_MAP_TENSOR: torch.tensor(token_map, dtype=torch.int64)})
    _write_json(folder / "config.json", config)
    return parsed


def make_byte_model(folder: Path, seed: int, text: Mapping[str, object] | None = None) -> V41Config:
    """The model of ``headrace model make deepseek-v41-tiny``: a made folder with the byte-level tokenizer."""
    # Not at the top: the rest of this module serves machines without PyPI `tokenizers` too.
    from headrace.engine.text.byte_tokenizer import make_byte_tokenizer
    from headrace.engine.text.engram_map import engram_token_map

    file = make_byte_tokenizer()
    vocabulary = Vocabulary(
        size=file.vocab_size,
        token_map=tuple(engram_token_map(file.serialized)),
        bos_token_id=file.bos_token_id,
        eos_token_id=file.eos_token_id,
        pad_token_id=file.pad_token_id,
        image_token_id=file.image_token_id,
        noise_token_id=file.noise_token_id,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(file.serialized, encoding="utf-8")
    return make_tiny(folder, seed, tiny_config(vocabulary, text), vocabulary.token_map)


def _table_rows(text: Mapping[str, object]) -> list[int]:
    sizes = [text[f"engram_{name}"] for name in ("max_ngram_size", "n_heads", "vocab_size", "compressed_vocab_size")]
    layers = text["engram_layer_ids"]
    if not isinstance(layers, list) or not all(isinstance(value, int) for value in (*layers, *sizes)):
        raise ModelError("engram_* sizes must be integers and engram_layer_ids a list of them")
    ngram, heads, vocab, compressed = (int(str(value)) for value in sizes)
    rows: list[int] = engram_constants(tuple(layers), ngram, heads, vocab, compressed).table_rows.tolist()
    return rows


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(save(tensors, metadata={"format": "pt"}))
    os.replace(unfinished, path)


_QUANTISATION: dict[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_TEXT: dict[str, object] = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5,
    "rms_norm_eps": 1e-20,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0],
    "compress_rope_theta": 160000.0,
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7],
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 12,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 101,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
_VISION: dict[str, object] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 4,
    "rope_theta": 10000.0,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 144,
    "max_wh_ratio": None,
}
