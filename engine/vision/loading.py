"""The vision tensors of a model folder; the text weights of the same files stay untouched on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from headrace.engine.vision.config import VisionError, read_vision_config
from headrace.engine.vision.tower import VisionTower

PREFIXES = ("vision.", "aligner.", "image_start", "image_end", "image_newline")


def load_vision_tower(folder: Path, *, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """Build the tower of a V4.1 folder. Raises VisionError when the model has none or a tensor is missing."""
    config = read_vision_config(folder)
    if config is None:
        raise VisionError(f"the model in {folder} has no vision tower")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
                plain = name.removeprefix("model.")
                if plain.startswith(PREFIXES):
                    weights[plain] = tensors.get_tensor(name)
    return VisionTower(config, weights, dtype, device)
