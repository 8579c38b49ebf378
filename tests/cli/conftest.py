"""A made V4.1-tiny, once per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.model import make
from tests.cli.router_double import RouterDouble, serving
from tests.services.gateway.fakes import make_folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `headrace model make deepseek-v41-tiny` makes."""
    return make("deepseek-v41-tiny", tmp_path_factory.mktemp("models"), 0)


@pytest.fixture
def double() -> RouterDouble:
    return RouterDouble()


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and chat template of the double's model."""
    return make_folder(tmp_path_factory.mktemp("double") / "model", template=True)


@pytest.fixture
def router(double: RouterDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("HEADRACE_RUNTIME", str(tmp_path / "runtime"))
    with serving(double) as address:
        yield address
