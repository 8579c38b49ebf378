"""bench.structured in its short form: a model of random weights under the first schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.structured import generated
from bench.structured_harness.generate import load_cases
from headrace.engine.loading import ModelSettings
from headrace.engine.text.constraint_forms import from_schema
from tests.services.tiny import make_v3

CASES = 3


def test_every_schema_is_enforced() -> None:
    """Fifty, each with a name of its own, none refused."""
    cases = load_cases()
    assert len({case.name for case in cases}) == len(cases) == 50
    for case in cases:
        from_schema(json.dumps(case.schema))


def test_answers_that_stop_are_valid(tmp_path: Path) -> None:
    """Even random weights write instances, whose masks both libraries make."""
    pytest.importorskip("llguidance", reason="llguidance is what xgrammar is compared with (extra dev)")
    load = ModelSettings(dtype="float32", block_tokens=16, native_kernels=False)
    results: dict[str, Any]
    results, table = generated(make_v3(tmp_path / "model"), CASES, 400, load, CASES, threads=1)
    assert len(table) == results["cases"] == CASES
    assert results["valid"] == results["stopped"]
    assert results["invalid"] == {}
    assert results["cost"]["masks"] == results["tokens"]
    assert results["llguidance"]["schemas_refused"] == 0
