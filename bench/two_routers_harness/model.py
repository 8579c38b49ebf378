"""The model: the least DeepSeek-V3 that has every part. A step of the small V4.1 takes ten times as long, and nothing
here asks for it."""

from __future__ import annotations

from pathlib import Path

from bench.gpu.tiny import make_v3
from headrace.engine.text.byte_tokenizer import make_byte_tokenizer

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}


def make_model(folder: Path) -> Path:
    """Random weights, and the byte tokenizer, which the routers want."""
    make_v3(folder, 0, SIZES)
    (folder / "tokenizer.json").write_text(make_byte_tokenizer().serialized, encoding="utf-8")
    return folder
