"""`headrace simulate`: flags, one run, a whole search, pictures."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from rich.console import Console

from headrace.cli import simulate as module
from headrace.cli import simulate_report
from headrace.cli.exits import CliError, Exit
from headrace.cli.simulate import SimulateOptions, bars_of, simulate
from headrace.cli.simulate_search import Cell
from headrace.router.simulate.generated import Shape, generate, write_trace
from headrace.router.simulate.run import Times
from headrace.router.simulate.score import MOST, Score, search
from headrace.router.simulate.spec import Cluster
from headrace.router.simulate.traces import Trace, TraceFormat, TraceRow
from headrace.router.simulate.workload import columns

SHAPE = Shape(requests=300, span_s=120.0, median_blocks=30.0, median_output=40.0, spread=0.6, longest_blocks=120)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> SimulateOptions:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(generate(SHAPE, seed=4), path)
    return SimulateOptions("2+2", path, warmup_s=3.0, measured_s=4.0, jobs=1, as_json=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trace": None}, "--trace FILE is missing"),
        ({"trace": Path("nowhere.jsonl")}, "nowhere.jsonl"),
        ({"unit": "64"}, "64\\+64"),
        ({"unit": "0+0"}, "no ranks"),
        ({"unit": "2+0", "modes": ("joint",)}, "no ranks for --mode joint"),
        ({"decode_group": 3, "unit": "2+4"}, "do not divide"),
        ({"policies": ("best",)}, "--policy best"),
        ({"modes": ("both",)}, "--mode both"),
        ({"measured_s": 500.0, "load": 0.5}, "do not fit"),
        ({"warmup_s": math.inf}, "--warmup inf"),
        ({"measured_s": math.nan}, "--measure nan"),
        ({"load": math.nan}, "--load nan"),
        ({"store_gbit_s": math.inf}, "--store inf"),
        ({"load": 0.5, "quick": True}, "--quick are for scores"),
        ({"load": 0.5, "seeds": 2}, "--seeds and"),
        ({"load": 0.5, "modes": ("prefill", "joint")}, "one --mode"),
        ({"engine": Path("nowhere.toml")}, "--engine"),
    ],
)
def test_wrong_flags_are_one_line(options: SimulateOptions, change: dict[str, object], says: str) -> None:
    with pytest.raises(CliError, match=says):
        simulate(replace(options, **change))  # type: ignore[arg-type]


def test_a_run_with_faults_tells_ends_and_draws(
    options: SimulateOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "faults.toml"
    script.write_text('[[event]]\nat = 4.0\ndo = "die"\nreplica = "prefill-0"\n', encoding="utf-8")
    asked = replace(options, load=0.4, scenario=script, plots=tmp_path / "plots")
    assert simulate(asked) == Exit.DONE
    told = json.loads(capsys.readouterr().out)
    run = told["runs"]["headrace"]
    assert sum(run["ends"].values()) == run["arrivals"] > 0
    assert run["log"] == ["4.00 s: die prefill-0"]
    assert told["problems"] == []
    assert [Path(path).stat().st_size > 1000 for path in told["plots"]] == [True, True]
    script.write_text('[[event]]\nat = 4.0\ndo = "die"\nreplica = "prefill-9"\n', encoding="utf-8")
    with pytest.raises(CliError, match="prefill-9 is no replica"):
        simulate(asked)


def test_a_search_ends_with_a_score(options: SimulateOptions, capsys: pytest.CaptureFixture[str]) -> None:
    asked = replace(options, unit="2+0", policies=("headrace", "round_robin"), seeds=1)
    assert simulate(asked) == Exit.DONE
    told = json.loads(capsys.readouterr().out)
    rows = told["scores"]["prefill"]
    assert set(told["scores"]) == {"prefill"}
    assert 0.2 < rows["round_robin"]["score"] <= 1.2
    assert rows["headrace"]["by_seed"] == {"1": rows["headrace"]["score"]}
    assert rows["headrace"]["ttft_s"]["p99"] <= 4.0
    passed = {trial["load"] for trial in rows["headrace"]["trials"] if trial["passed"]}
    assert max(passed) == rows["headrace"]["score"]
    assert told["passed"] is None, "bars are for 64+64"
    assert told["offline"]["prefill"]["decode_requests_per_s"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"unit": "32+32"},
        {"quick": True},
        {"seeds": 1},
        {"warmup_s": 10.0},
        {"measured_s": 30.0},
        {"engine": Path("fast.toml")},
        {"cache_blocks": 100},
        {"store_gbit_s": 10.0},
        {"decode_group": 1},
    ],
)
def test_the_project_s_bars_are_of_one_measurement(
    options: SimulateOptions, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options.trace is not None
    asked = SimulateOptions("64+64", options.trace)
    assert bars_of(asked, options.trace) == {}, "another trace"
    monkeypatch.setattr(module, "BARS_TRACE", hashlib.sha256(options.trace.read_bytes()).hexdigest())
    assert bars_of(asked, options.trace) == module.BARS
    assert bars_of(replace(asked, policies=("headrace",), modes=("joint",), jobs=2), options.trace) == module.BARS
    assert bars_of(replace(asked, **change), options.trace) == {}  # type: ignore[arg-type]


def test_a_score_at_the_ceiling_of_the_search_is_marked() -> None:
    found = {}
    for policy, most in (("headrace", MOST), ("round_robin", 90)):
        cell = Cell("prefill", policy, Cluster(2, 0), search([1], 90))
        cell.score = Score(most, {}, ())
        found[policy] = cell
    trace = columns(Trace(TraceFormat.MOONCAKE, [TraceRow(0.0, 5, 5, (1,)), TraceRow(1.0, 5, 5, (1,))]))
    document = simulate_report.scored("2+0", trace, {"prefill": found}, {}, [1], Times(1.0, 1.0))
    assert {policy: row["at_ceiling"] for policy, row in document["scores"]["prefill"].items()} == {
        "headrace": True,
        "round_robin": False,
    }
    console = Console(record=True, width=120)
    simulate_report.show(document, console)
    text = console.export_text()
    assert "≥ 1.20" in text
    assert "≥ 0.90" not in text


def test_workers_end_with_the_command(options: SimulateOptions) -> None:
    """L11: also when it is killed, in the middle of a run."""
    command = [sys.executable, "-m", "headrace.cli.main", "simulate", "--unit", "64+64", "--jobs", "1", "--json"]
    flags = ["--trace", str(options.trace), "--warmup", "50", "--measure", "10", "--load", "0.9"]
    running = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        workers = wait_for(lambda: [pid for pid in children(running.pid) if "spawn_main" in command_line(pid)])
    finally:
        running.kill()
        running.wait()
    assert workers
    assert wait_for(lambda: not any("spawn_main" in command_line(pid) for pid in workers))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> str:
    """Empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


T = TypeVar("T")


def wait_for(found: Callable[[], T], patience_s: float = 60.0) -> T:
    """What is found in the end, at the latest after that time."""
    end = time.monotonic() + patience_s
    while not (answer := found()) and time.monotonic() < end:
        time.sleep(0.05)
    return answer
