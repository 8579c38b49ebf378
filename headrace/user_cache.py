"""Where this user's processes keep what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$HEADRACE_CACHE, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
