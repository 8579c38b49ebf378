"""A model folder (config.json + safetensors) becomes a Model. Families are found by config.json's ``architectures``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal, cast

import torch

from headrace.engine.described import described, require
from headrace.engine.model import Model

FAMILIES: dict[str, str] = {
    "DeepseekV3ForCausalLM": "headrace.engine.models.deepseek_v3.model",
    "DeepseekV41ForCausalLM": "headrace.engine.models.deepseek_v41.model",
}
"""Architecture → module with ``load(folder: Path, config: dict[str, object], settings: ModelSettings) -> Model``."""


class ModelError(ValueError):
    """The folder or the settings describe no model that can be loaded; the message says what to change."""


@dataclass(frozen=True)
class ModelSettings:
    """How a model folder is loaded. Whatever changes the bytes of a KV row is part of :attr:`numeric_identity`."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    device: str = described("cpu", "torch device of weights and computation: cpu, cuda, cuda:1 …")
    dtype: Literal["auto", "float32", "bfloat16"] = described(
        "auto", "Type of weights and KV; auto is what the folder's config says. float32 is exact, bfloat16 fast."
    )
    numeric_mode: Literal["noquant", "kvquant", "full"] = described(
        "noquant", "V4.1's quantisation steps (spec §19); V3 knows noquant only."
    )
    entry_format: Literal["auto", "native", "float32"] = described(
        "auto",
        "KV entries: native is the model's own format, float32 keeps them unrounded; auto is native unless the numeric "
        "mode rounds no entries (V4.1 in noquant). Workers of one cluster must say the same word.",
    )
    batch_invariant: bool = described(
        False, "A row's bytes do not depend on its batch, chunking, prefill or decode (L5). CPU: needs float32."
    )
    block_tokens: int = described(128, "Positions per pool row.")
    backtracking: int = described(6, "V4.1: ring tokens beyond the window (drafts + 1 at least). V3 ignores it.")
    attention: Literal["auto", "absorbed", "naive"] = described(
        "auto", "V3: MLA form. auto takes the cheaper one per step; batch_invariant always runs absorbed."
    )
    native_kernels: bool = described(
        True, "Use the C++ kernels where a compiler was found (kernels/native); off runs torch operators only."
    )

    def __post_init__(self) -> None:
        require(self.block_tokens >= 1, "block_tokens", "must be at least 1")
        require(self.backtracking >= 1, "backtracking", "must be at least 1")
        require(self.dtype in ("auto", "float32", "bfloat16"), "dtype", "must be auto, float32 or bfloat16")
        modes = ("noquant", "kvquant", "full")
        require(self.numeric_mode in modes, "numeric_mode", "must be noquant, kvquant or full")
        require(self.entry_format in ("auto", "native", "float32"), "entry_format", "must be auto, native or float32")
        require(self.attention in ("auto", "absorbed", "naive"), "attention", "must be auto, absorbed or naive")

    def resolved_dtype(self, folder_dtype: torch.dtype) -> torch.dtype:
        """The dtype to load in, given the folder's own."""
        if self.dtype == "auto":
            return folder_dtype
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    def numeric_identity(self, folder_dtype: torch.dtype) -> str:
        """The string of the settings that ``model_fp`` covers ("numeric mode" of spec/protocol.md)."""
        dtype = str(self.resolved_dtype(folder_dtype)).removeprefix("torch.")
        invariant = "invariant" if self.batch_invariant else "free"
        return f"{self.numeric_mode}/{dtype}/{self.entry_format}/{invariant}"


def read_config(folder: Path) -> dict[str, object]:
    """Parse ``folder/config.json``.

    Raises:
        ModelError: there is no such file, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{folder} has no config.json; give a Hugging Face model folder (headrace model fetch)"
        ) from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return cast("dict[str, object]", config)


def folder_dtype(config: dict[str, object]) -> torch.dtype:
    """The dtype a folder declares (``dtype`` or the older ``torch_dtype``); float32 when silent.

    Raises:
        ModelError: neither float32 nor bfloat16 (float16 is refused: 0.4 GFLOP/s on the CPU, and range on the GPU).
    """
    name = config.get("dtype", config.get("torch_dtype", "float32"))
    if name in ("float32", "bfloat16"):
        return torch.float32 if name == "float32" else torch.bfloat16
    raise ModelError(
        f"config.json declares dtype {name!r}; headrace loads float32 and bfloat16, convert the folder first"
    )


def family_of(config: dict[str, object]) -> str:
    """The module that loads this config's architecture.

    Raises:
        ModelError: no known architecture is named.
    """
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ModelError(f"config.json names architectures {names}; known are {sorted(FAMILIES)}")


def load_model(folder: Path | str, settings: ModelSettings | None = None) -> Model:
    """Load a model folder. Weights stay memory-mapped (shared between processes) where their dtype matches.

    Raises:
        ModelError: the folder, its config or the settings are unusable; the message names the field.
    """
    path = Path(folder)
    settings = settings or ModelSettings()
    config = read_config(path)
    module = import_module(family_of(config))
    return cast("Model", module.load(path, config, settings))
