"""bench.structured in its short form: a model of random weights under the first schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.structured import generated, shown
from bench.structured_harness.generate import constraint_of, load_cases
from bench.structured_harness.judge import fault_of
from headrace.engine.loading import ModelSettings
from tests.services.tiny import make_v3

CASES = 3


def test_every_schema_is_enforced() -> None:
    """Fifty, each with a name of its own, none refused."""
    cases = load_cases()
    assert len({case.name for case in cases}) == len(cases) == 50
    for case in cases:
        constraint_of(case)


def test_answers_that_stop_are_valid(tmp_path: Path) -> None:
    """Even random weights write instances, whose masks both libraries make."""
    pytest.importorskip("llguidance", reason="llguidance is what xgrammar is compared with (extra dev)")
    load = ModelSettings(dtype="float32", block_tokens=16, native_kernels=False)
    results: dict[str, Any]
    results, table = generated(make_v3(tmp_path / "model"), CASES, 400, load, CASES, threads=1)
    assert len(table) == results["cases"] == CASES
    assert results["valid"] == results["finished"] == CASES - results["length"]
    assert results["invalid_cases"] == {}
    assert results["cost"]["masks"] == results["tokens"]
    assert results["llguidance"]["schemas_refused"] == 0


def test_what_fails_the_program() -> None:
    """An invalid answer, and answers that mostly do not end."""
    assert shown({"cases": 50, "finished": 25, "invalid": 0})
    assert not shown({"cases": 50, "finished": 24, "invalid": 0})
    assert not shown({"cases": 50, "finished": 50, "invalid": 1})


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("date-time", "2026-02-28T23:59:59+01:00", "2026-02-29T00:00:00Z"),
        ("date", "2024-02-29", "2023-02-29"),
        ("uri", "https://a.example/b", "a.example"),
        ("email", "a@b.example", "a.b.example"),
    ],
)
def test_the_judge_looks_at_formats(kind: str, good: str, bad: str) -> None:
    """A twin of the grammar's formats, from other libraries."""
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": kind}}}
    assert fault_of(f'{{"x":"{good}"}}', schema) == ""
    assert fault_of(f'{{"x":"{bad}"}}', schema)
    assert fault_of('{"x":"', schema).startswith("no JSON")
