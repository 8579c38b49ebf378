"""Where model folders of this machine live. No torch: the CLI asks at start."""

from __future__ import annotations

import os
from pathlib import Path


def models_directory() -> Path:
    """$HEADRACE_MODELS; else ``models/`` of the checkout the code runs from; else the XDG data directory.

    The directory need not exist yet.
    """
    if own := os.environ.get("HEADRACE_MODELS"):
        return Path(own)
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "proto").is_dir():
        return checkout / "models"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "headrace" / "models"
