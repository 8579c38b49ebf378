"""Which golden folder is at hand: the whole set beside the repository, else the slice inside it."""

from __future__ import annotations

from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]
SLICE = _REPOSITORY / "tests" / "golden_data" / "v41"
WHOLE = _REPOSITORY.parent / "shared" / "golden" / "v41"


def golden_folder() -> Path:
    return WHOLE if (WHOLE / "manifest.json").is_file() else SLICE
