"""A made V4.1-tiny, once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.model import make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `headrace model make deepseek-v41-tiny` makes."""
    return make("deepseek-v41-tiny", tmp_path_factory.mktemp("models"), 0)
