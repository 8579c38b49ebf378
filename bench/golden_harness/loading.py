"""Models of a golden folder's checkpoint, loaded once per setting."""

from __future__ import annotations

from functools import cache
from math import lcm
from pathlib import Path
from typing import Literal, cast

from bench.golden_harness.case import Case, GoldenFormatError
from headrace.engine.loading import ModelSettings, load_model, read_config
from headrace.engine.models.deepseek_v41.model import DeepseekV41
from headrace.engine.models.deepseek_v41.parse import parse_config


def model_of(case: Case, *, block_tokens: int = 128, device: str = "cpu") -> DeepseekV41:
    """The case's checkpoint in the case's numeric mode; on the CPU batch invariant unless bf16, so chunks agree."""
    if case.checkpoint is None:
        raise GoldenFormatError(f"case {case.name} names no checkpoint")
    return _load(case.checkpoint, str(case.config["mode"]), _whole_groups(case.checkpoint, block_tokens), device)


def _whole_groups(folder: Path, block_tokens: int) -> int:
    """``block_tokens`` rounded up to a multiple of every compression ratio of the folder."""
    ratios = [ratio for ratio in parse_config(read_config(folder)).compress_ratios if ratio > 0]
    return -(-block_tokens // lcm(*ratios)) * lcm(*ratios)


@cache
def _load(folder: Path, mode: str, block_tokens: int, device: str) -> DeepseekV41:
    settings = ModelSettings(
        device=device,
        numeric_mode=cast("Literal['noquant', 'kvquant', 'full']", mode),
        entry_format="float32" if mode == "noquant" else "native",
        batch_invariant=mode != "full" and device == "cpu",
        block_tokens=block_tokens,
    )
    model = load_model(folder, settings)
    if not isinstance(model, DeepseekV41):
        raise GoldenFormatError(f"{folder} is no DeepSeek-V4.1 checkpoint")
    return model
