"""Compiled languages for the toy model's byte vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.isolated import Isolated
from headrace.engine.masks.grammars import CHILD, Grammars
from headrace.engine.settings import EngineSettings


@pytest.fixture(scope="session")
def process() -> Iterator[Isolated]:
    """One for all: each takes seconds to start."""
    made = Isolated(CHILD, memory_bytes=2 << 30)
    yield made
    made.close()


@pytest.fixture(scope="session")
def grammars(kit: Any, process: Isolated) -> Grammars:
    settings = EngineSettings(grammar_compile_s=120.0)
    return Grammars(kit.tokenizer, kit.tokenizer.size, (kit.eos,), settings, process=process)


@pytest.fixture(scope="session")
def held(kit: Any, grammars: Grammars) -> Any:
    """A request of the toy that is held to a constraint."""

    def make(name: str, prompt: Any, constraint: Any, **changes: Any) -> Any:
        request = kit.request(name, prompt, **{"ignore_eos": False, "max_tokens": 60, **changes})
        return replace(request, constraint=constraint, grammar=grammars.get(constraint))

    return make
