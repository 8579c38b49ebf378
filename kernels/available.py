"""Which optional backends this installation has."""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def has_triton(device_type: str) -> bool:
    """Triton serves CUDA devices; torch's CUDA builds bring it along."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None
