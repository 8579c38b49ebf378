"""bench.experts on generated routing, and that its bars can be missed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import experts
from bench.experts import Cell, Corpus, RoutingError, build_report, read_routing
from tests.router.balancers.experts.routing import counted, routing


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("routing") / "routing.npz"
    ids = routing(4 * 1024, 2, 16, top_k=3, run=200)
    np.savez(path, text_ids=ids, text_doclens=np.full(4, 1024))
    return path


def test_plans_on_one_half_and_judges_on_the_other(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = 0
    try:
        experts.main(["--routing", str(recorded), "--ep", "4", "8", "--experts", "16", "--json"])
    except SystemExit as ended:
        status = int(ended.code or 0)
    document = json.loads(capsys.readouterr().out)
    assert status == (0 if document["limits_met"] else 1)
    assert [(cell["corpus"], cell["ep"]) for cell in document["cells"]] == [("text", 4), ("text", 8)]
    for cell in document["cells"]:
        assert cell["none"] < cell["eplb"] < cell["headrace"] <= 1
        assert 0 < cell["moves_headrace"] <= cell["moves_eplb"]
    assert document["checks"] == {"mean_gain": True, "no_cell_below": True, "no_more_moves": True}


def test_steps_are_counted_as_a_plain_twin_counts_them() -> None:
    ids = routing(500, 3, 16, top_k=3)
    corpus = Corpus("text", ids)
    assert np.array_equal(corpus.steps(0, 64, 16), counted(ids[:, :250], 64, 16))
    assert np.array_equal(corpus.steps(1, 64, 16), counted(ids[:, 250:], 64, 16))


CELL = Cell(
    "text", 8, headrace=0.92, eplb=0.9, none=0.7, moves_headrace=10, moves_eplb=12, seconds=1.0, cpu_seconds=1.0
)


@pytest.mark.parametrize(
    ("cells", "missed"),
    [
        ([CELL], None),
        ([replace(CELL, headrace=0.909)], "mean_gain"),
        ([CELL, CELL, CELL, replace(CELL, headrace=0.894)], "no_cell_below"),
        ([CELL, replace(CELL, moves_headrace=13)], "no_more_moves"),
    ],
)
def test_each_bar_can_be_missed(cells: list[Cell], missed: str | None) -> None:
    checks = build_report(cells).results["checks"]
    assert isinstance(checks, dict)
    assert {name for name, met in checks.items() if not met} == ({missed} if missed else set())


def test_files_without_routing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, doclens=np.arange(3))
    with pytest.raises(RoutingError, match="NAME_ids"):
        read_routing(path)
    np.savez(path, text_ids=np.arange(3))
    with pytest.raises(RoutingError, match="layers, tokens, top k"):
        read_routing(path)
    with pytest.raises(RoutingError, match="at least one step"):
        Corpus("text", routing(100, 1, 8)).steps(0, 256, 8)
