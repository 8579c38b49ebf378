"""A served model as far as text goes: what is needed to read requests and to write answers. It knows no router."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import deepseek_recipe

from headrace.engine.text.assets import TextAssets
from headrace.v1 import common_pb2

Protocol = Literal["template", "v4.1"]


class Served:
    """One model."""

    def __init__(
        self, name: str, folder: Path, assets: TextAssets, protocol: Protocol, *, thinking: bool = False
    ) -> None:
        """`assets` are the folder's; `thinking`: of requests that say nothing of it."""
        self.name = name
        self.assets = assets
        self.protocol = protocol
        self.thinking = thinking
        self.recipe_tokenizer = deepseek_recipe.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.identity: common_pb2.ModelIdentity | None = None
        """Of whoever computes, as soon as it has said so."""

    def fingerprint(self) -> str:
        """`system_fingerprint`: another one means other weights, layout or numeric mode."""
        if self.identity is None:
            return ""
        digests = self.identity.model_fingerprint + self.identity.layout_fingerprint
        return "fp_" + hashlib.sha256(digests).hexdigest()[:16]
