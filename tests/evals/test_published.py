"""Files of published sets, with questions of our own in their columns."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.evals.datasets import load_dataset
from headrace.evals.errors import EvalError
from headrace.evals.rows import read_rows

AIME = [
    {"problem_idx": 1, "answer": 7, "problem": "What is $3+4$?"},
    {"problem_idx": 2, "answer": "021", "problem": "What is $3 \\cdot 7$?"},
]
HLE_ROW = {
    "id": "h1", "question": "Which?", "image": "", "image_preview": None, "answer": "this", "answer_type": "exactMatch",
    "author_name": "x", "rationale": "", "rationale_image": None, "raw_subject": "Logic", "category": "Other",
    "canary": "none",
}  # fmt: skip


def gpqa(number: int) -> dict[str, Any]:
    wrong = {f"Incorrect Answer {place}": f"wrong {place}" for place in (1, 2, 3)}
    domain = "Physics" if number % 2 else "Biology"
    return {"Record ID": f"rec{number}", "Question": f"q{number}, which?", "Correct Answer": " right ", **wrong,
            "High-level domain": domain, "Subdomain": "x"}  # fmt: skip


def as_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow (extra evals)")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def test_aime_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, AIME)))
    (tmp_path / "a.json").write_text(json.dumps(AIME))
    files = [tmp_path / "a.jsonl", tmp_path / "a.json", as_csv(tmp_path / "a.csv", AIME)]
    parquet = [{**row, "answer": int(row["answer"])} for row in AIME]  # a column has one type
    files.append(as_parquet(tmp_path / "a.parquet", parquet))
    for file in files:
        items = load_dataset("aime-2026", file).items
        assert [(item.identifier, item.answer, item.rule) for item in items] == [
            ("1", "7", "boxed_integer"), ("2", "21", "boxed_integer")]  # fmt: skip
        assert items[0].turns[0].text.startswith("What is $3+4$?")
        assert "\\boxed{}" in items[0].turns[0].text


def test_gpqa_choices_are_shuffled_by_record(tmp_path: Path) -> None:
    file = as_csv(tmp_path / "gpqa_diamond.csv", [gpqa(number) for number in range(60)])
    items = load_dataset("gpqa-diamond", file).items
    assert items == load_dataset("gpqa-diamond", file).items
    assert {item.subset for item in items} == {"Physics", "Biology"}
    for item in items:
        assert f"\n{item.answer}) right\n" in item.turns[0].text + "\n"
        assert item.turns[0].text.count("wrong") == 3
    places = Counter(item.answer for item in items)
    assert set(places) == set("ABCD")
    assert min(places.values()) >= 5


def test_hle_takes_its_pictures_along(tmp_path: Path) -> None:
    rows = [HLE_ROW, {**HLE_ROW, "id": "h2", "image": "data:image/png;base64,AAE="}]
    file = as_parquet(tmp_path / "hle.parquet", [{**row, "image_preview": "", "rationale_image": ""} for row in rows])
    plain, pictured = load_dataset("hle", file).items
    assert (plain.rule, plain.answer, plain.subset, plain.question) == ("judge", "this", "Other", "Which?")
    assert [turn.role for turn in plain.turns] == ["system", "user"]
    assert plain.turns[1].images == ()
    assert pictured.turns[1].images == ("data:image/png;base64,AAE=",)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("aime-2026", [{"problem": "x", "answer": "1000"}], "no integer from 0 to 999"),
        ("aime-2026", [{"answer": 3}], "a row has no 'problem'"),
        ("aime-2026", [AIME[0], AIME[0]], "two items are called '1'"),
        ("gpqa-diamond", [{"Question": "x"}], "a row has no 'Correct Answer'"),
        ("hle", [{**HLE_ROW, "image": "https://x"}], "its image is no data URL"),
        ("hle", [], "holds no rows"),
    ],
)
def test_other_files_are_refused(name: str, rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps(rows))
    with pytest.raises(EvalError, match=message):
        load_dataset(name, file)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "x.xlsx").write_text("")
    (tmp_path / "x.jsonl").write_text("{")
    for name, message in (("x.xlsx", ".xlsx; .jsonl"), ("x.jsonl", "x.jsonl"), ("absent.csv", "No such file")):
        with pytest.raises(EvalError, match=message):
            read_rows(tmp_path / name)
