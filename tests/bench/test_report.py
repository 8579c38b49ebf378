"""bench/_report.py: what a bench prints can be read by a program."""

from __future__ import annotations

import json

import pytest

from bench._report import Report, arguments, emit


def sample() -> Report:
    return Report(
        name="sample",
        results={"ratio": 0.7, "transports": ["cma", "tcp"]},
        table=[{"rows": 1, "gb_per_s": 2.5}, {"rows": 64, "gb_per_s": 3.0}],
        notes=["one sentence."],
    )


def test_json_is_one_object_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    emit(sample(), as_json=True)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    document = json.loads(out)
    assert document["bench"] == "sample"
    assert document["ratio"] == 0.7
    assert document["rows"][1] == {"rows": 64, "gb_per_s": 3.0}
    assert document["machine"]["cores"] >= 1
    assert "torch" in document["versions"]


def test_table_shows_every_row_and_note(capsys: pytest.CaptureFixture[str]) -> None:
    emit(sample(), as_json=False)
    out = capsys.readouterr().out
    assert "gb_per_s" in out
    assert "64" in out
    assert "one sentence." in out


def test_reserved_names_and_nan_are_refused() -> None:
    with pytest.raises(ValueError, match="machine"):
        Report(name="x", results={"machine": 1}).to_json()
    with pytest.raises(ValueError, match="JSON"):
        Report(name="x", results={"ratio": float("nan")}).to_json()


def test_every_bench_takes_json() -> None:
    assert arguments("doc").parse_args(["--json"]).json is True
