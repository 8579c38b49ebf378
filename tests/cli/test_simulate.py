"""`headrace simulate`: flags, one run, a whole search, pictures."""

from __future__ import annotations

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

from headrace.cli.exits import CliError, Exit
from headrace.cli.simulate import SimulateOptions, simulate
from headrace.router.simulate.generated import Shape, generate, write_trace

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
