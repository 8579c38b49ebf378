"""Folders: what loads, what is refused, and that made folders are reproducible."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.golden_harness.serving import admit, make_batch, prefill
from headrace.engine.batch import StepBatch
from headrace.engine.loading import ModelError, ModelSettings, load_model
from headrace.engine.models.deepseek_v41.make import make_byte_model, make_tiny, plain_vocabulary, tiny_config
from headrace.engine.models.deepseek_v41.model import DeepseekV41
from headrace.engine.text.engram_map import engram_token_map
from headrace.kvcache.pool import KVPool

VOCABULARY = plain_vocabulary(70, 50)
SHORT: dict[str, object] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "compress_ratios": [2, 1, 1, 0],
    "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "candidate_source_layer_id": None,
    "engram_layer_ids": [0],
    "engram_n_heads": 1,
    "dspark_target_layer_ids": [1, 2],
    "n_routed_experts": 3,
    "dspark_n_routed_experts": 2,
    "sliding_window": 4,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "model", 1, tiny_config(VOCABULARY, SHORT), VOCABULARY.token_map)
    return tmp_path / "model"


def answer(folder: Path, **settings: object) -> torch.Tensor:
    model = load_model(folder, ModelSettings(block_tokens=8, **settings))  # type: ignore[arg-type]
    pool = KVPool(model.layout, num_rows=4, num_slots=2)
    return prefill(model, pool, admit(pool, [5, 6, 7, 8, 9, 10], capacity=8), 4)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def test_a_seed_is_a_folder(tmp_path: Path, folder: Path) -> None:
    make_tiny(tmp_path / "again", 1, tiny_config(VOCABULARY, SHORT), VOCABULARY.token_map)
    make_tiny(tmp_path / "other", 2, tiny_config(VOCABULARY, SHORT), VOCABULARY.token_map)
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("again", "other")}
    assert (folder / "model.safetensors").read_bytes() == files["again"] != files["other"]


def test_names_may_carry_a_prefix(folder: Path) -> None:
    plain = answer(folder)
    rewrite(folder, lambda t: [t.update({f"model.{name}": t.pop(name)}) for name in list(t)])
    assert torch.equal(answer(folder), plain)


def test_files_may_be_split(folder: Path) -> None:
    plain = answer(folder)
    tensors = load_file(folder / "model.safetensors")
    parts = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(answer(folder), plain)


@pytest.mark.parametrize("mode", ["noquant", "kvquant", "full"])
def test_every_mode_answers(folder: Path, mode: str) -> None:
    logits = answer(folder, numeric_mode=mode)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.attn.compressor.wkv.weight"), "layers.1.attn.compressor.wkv.weight"),
        (lambda t: t.update({"layers.0.hc_attn_norm": torch.ones(3)}), "hyper-connection norms"),
        (lambda t: t.update({"layers.0.hc_attn_fn": t["layers.0.hc_attn_fn"].bfloat16()}), "bfloat16"),
        (lambda t: t.update({"norm.weight": torch.ones(31, dtype=torch.bfloat16)}), "norm.weight"),
        (lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()}), "both"),
    ],
)
def test_broken_tensors_are_refused(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entry_format": "native"}, "entry_format float32"),
        ({"dtype": "bfloat16"}, "leave dtype at auto"),
        ({"numeric_mode": "full", "batch_invariant": True}, "batch_invariant"),
        ({"numeric_mode": "kvquant", "block_tokens": 7}, "block_tokens"),
    ],
)
def test_settings_that_do_not_fit(folder: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(folder, ModelSettings(**settings))  # type: ignore[arg-type]


def test_token_map_must_fit(folder: Path) -> None:
    path = folder / "engram_token_map.safetensors"
    save_file({"engram_token_map": torch.full((70,), 50)}, path)
    with pytest.raises(ModelError, match="compressed size is 50"):
        load_model(folder)
    path.unlink()
    with pytest.raises(ModelError, match="token map"):
        load_model(folder)


def test_the_byte_model(tmp_path: Path) -> None:
    """Vocabulary and compressed size follow from the tokenizer; its text goes through the model."""
    config = make_byte_model(tmp_path, 0, SHORT)
    token_map = engram_token_map((tmp_path / "tokenizer.json").read_text())
    assert config.engram is not None
    assert config.engram.compressed_vocab_size == len(set(token_map))
    assert config.vocab_size == len(token_map)
    assert answer(tmp_path).isfinite().all()


def test_a_foreign_pool_is_refused(folder: Path) -> None:
    model, other = (load_model(folder, ModelSettings(block_tokens=n)) for n in (8, 16))
    assert isinstance(model, DeepseekV41)
    pool = KVPool(other.layout, num_rows=4, num_slots=2)
    batch: StepBatch = make_batch(model, [(admit(pool, [1, 2], capacity=2), 2)])
    with pytest.raises(ModelError, match="layout"):
        model.forward(batch, pool)
