"""SmolLM2 for the tests: converted once into the models directory (the download is kept there), read by every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine.folders import models_directory


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The models directory with both SmolLM2 folders in it."""
    pytest.importorskip("gguf", reason="gguf reads the source (extra demo)")
    from headrace.engine.converters.smollm2 import FetchError, fetch_smollm2

    try:
        fetch_smollm2()
    except FetchError as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")
    return models_directory()
