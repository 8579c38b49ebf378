"""Sizes of the vision tower, from the model's config (spec §1.1 vision_config, §14)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class VisionError(ValueError):
    """An image, or a vision config, cannot be used; the message says why and what would do."""


@dataclass(frozen=True)
class VisionConfig:
    """Tower and geometry. `max_wh_ratio` None: no limit on the shape of a picture."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None
    text_hidden_size: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 4:
            raise VisionError("vision hidden_size must be num_heads heads of a multiple of 4 channels (2-D rope)")
        if self.max_image_tokens < 5:
            raise VisionError("max_image_tokens must hold START, one IMAGE, NEWLINE and END")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def vision_config(config: dict[str, Any]) -> VisionConfig | None:
    """From the parsed config.json of a V4.1 folder (nested or flat keys). None: the model has no vision tower."""
    if "vision_config" in config:
        vision, text = config["vision_config"], config["text_config"]
        return VisionConfig(
            num_layers=vision["num_hidden_layers"],
            hidden_size=vision["hidden_size"],
            num_heads=vision["num_attention_heads"],
            intermediate_size=vision["intermediate_size"],
            patch_size=vision["patch_size"],
            rope_theta=vision.get("rope_theta", 10000.0),
            downsample_ratio=vision["downsample_ratio"],
            max_image_tokens=vision["max_image_tokens"],
            min_pixels=vision["min_pixels"],
            max_wh_ratio=vision.get("max_wh_ratio"),
            text_hidden_size=text["hidden_size"],
        )
    if config.get("vision_n_layers"):
        return VisionConfig(
            num_layers=config["vision_n_layers"],
            hidden_size=config["vision_dim"],
            num_heads=config["vision_n_heads"],
            intermediate_size=config["vision_inter_dim"],
            patch_size=config["vision_patch_size"],
            rope_theta=config.get("vision_rope_theta", 10000.0),
            downsample_ratio=config["vision_downsample_ratio"],
            max_image_tokens=config["vision_max_n_token"],
            min_pixels=config["vision_min_pixels"],
            max_wh_ratio=config.get("vision_max_wh_ratio"),
            text_hidden_size=config["dim"],
        )
    return None


def read_vision_config(folder: Path) -> VisionConfig | None:
    """`vision_config` of a folder's config.json."""
    return vision_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
