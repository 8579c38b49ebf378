"""What the router knows of the model it serves: text assets and sizes from the folder. Reads no weights, no torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.text.assets import ProtocolName, TextAssets, load_text_assets
from headrace.engine.text.errors import TextError
from headrace.engine.text.system_prefix import SystemPrefix
from headrace.engine.vision.config import VisionConfig, vision_config

NO_TOKENIZER = hashlib.sha256(b"headrace.no-tokenizer.1").digest()
"""Stands for the tokenizer's digest in the keys of models that take token ids only."""


@dataclass(frozen=True)
class ServedModel:
    """One served model."""

    name: str
    family: str
    """`deepseek_v3` or `deepseek_v41`."""
    vocab_size: int
    context_tokens: int
    image_token_id: int | None
    window: int
    """Sliding window; 0 for models whose cache is paged throughout."""
    text: TextAssets | None
    """None: the folder has no tokenizer; only token ids are taken."""
    vision: VisionConfig | None = None
    """Geometry of images; None: the model takes none."""
    system_prefix: SystemPrefix | None = None
    """Finds the part of a chat that others share; None without a window or a chat protocol."""

    @property
    def text_digest(self) -> bytes:
        return NO_TOKENIZER if self.text is None else self.text.digest

    def keep_tokens(self, wanted: int | None, backtracking: int) -> int:
        """K of bounded replay; 0 for models without a window."""
        if not self.window:
            return 0
        return wanted if wanted is not None else self.window + 2 * backtracking


def load_served_model(name: str, folder: Path, protocol: ProtocolName) -> ServedModel:
    """Read a model folder's config and text assets. Raises TextError when it is no model folder."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TextError(f"no config.json in {folder}; is this a model folder?") from None
    except ValueError as error:
        raise TextError(f"{path} is not JSON: {error}") from error
    text_config = config.get("text_config", config)
    family = str(config.get("model_type", ""))
    if family not in ("deepseek_v3", "deepseek_v41"):
        raise TextError(f"{path} says model_type {family!r}; deepseek_v3 and deepseek_v41 are served")
    window = int(text_config.get("sliding_window") or 0) if family == "deepseek_v41" else 0
    text = load_text_assets(folder, protocol) if (folder / "tokenizer.json").is_file() else None
    chat = text.chat if text is not None and window else None
    return ServedModel(
        name=name,
        family=family,
        vocab_size=int(text_config["vocab_size"]),
        context_tokens=int(text_config["max_position_embeddings"]),
        image_token_id=config.get("image_token_id") if "vision_config" in config else None,
        vision=vision_config(config) if "vision_config" in config else None,
        window=window,
        text=text,
        system_prefix=None if chat is None else SystemPrefix(chat),
    )
