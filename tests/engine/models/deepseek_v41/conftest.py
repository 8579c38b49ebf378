"""Small V4.1 models of several layer layouts, and the plain way through one: each sequence alone, in one piece."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.models.deepseek_v41.make import make_tiny, plain_vocabulary, tiny_config
from headrace.engine.models.deepseek_v41.model import DeepseekV41

SMALL: dict[str, object] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 3,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 3,
    "index_head_dim": 32,
    "index_topk": 4,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 3,
    "engram_layer_ids": [0, 2],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 1,
    "dspark_target_layer_ids": [3, 5],
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
}
"""No width is a multiple of a vector where it need not be."""

LAYOUTS: dict[str, dict[str, object]] = {
    "small": {},
    "ratio 4, no candidates, no drafts": {
        "compress_ratios": [0, 4, 4, 0, 1, 1],
        "kv_source_layer_ids": [1, 4],
        "index_source_layer_ids": [1, 2, 4],
        "candidate_source_layer_id": None,
        "num_nextn_predict_layers": 0,
        "engram_layer_ids": [3],
        "engram_max_ngram_size": 2,
    },
    "no consumers, no Engram": {
        "num_hidden_layers": 4,
        "compress_ratios": [2, 2, 0, 2, 0],
        "kv_source_layer_ids": [0, 3],
        "index_source_layer_ids": [0, 3],
        "candidate_source_layer_id": None,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "dspark_target_layer_ids": [1],
        "swiglu_limit": 0.0,
    },
}
VOCABULARY = plain_vocabulary(90, 61)
BLOCK, BACKTRACKING = 8, 2


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folder_of(layout)``: a made folder, one per layout."""

    @cache
    def folder(layout: str) -> Path:
        path = tmp_path_factory.mktemp("v41")
        make_tiny(path, 3, tiny_config(VOCABULARY, SMALL | LAYOUTS[layout]), VOCABULARY.token_map)
        return path

    return folder


@pytest.fixture(scope="session")
def model_of(folder_of: Callable[[str], Path]) -> Callable[..., DeepseekV41]:
    """``model_of(layout="small", mode="noquant", **settings)``: a loaded model, one per distinct call."""

    @cache
    def load(layout: str = "small", mode: str = "noquant", **settings: Any) -> DeepseekV41:
        values = {
            "entry_format": "float32" if mode == "noquant" else "native",
            "batch_invariant": mode != "full",
            "block_tokens": BLOCK,
            "backtracking": BACKTRACKING,
        } | settings
        model = load_model(folder_of(layout), ModelSettings(numeric_mode=mode, **values))  # type: ignore[arg-type]
        assert isinstance(model, DeepseekV41)
        return model

    return load


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
