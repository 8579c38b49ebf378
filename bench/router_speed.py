"""How fast one router process is: the decision, its memory, and what it adds to a streamed answer.

    python -m bench.router_speed --json [--dynamo-python DIR/bin/python]

`decisions`: match in an index of a million blocks, choice of the pair, accounting at both ranks and at a request's end,
one thread, at 8, 100 and 1,000 replicas of each role, prompts of 7 blocks (900 tokens) and of 1,000 blocks
(router_speed_harness/decision.py says what is in the index). Wall times suffer from whatever else runs on the machine;
`cpu_` times hardly do.

`index_memory`: growth of a process's resident set for each pair of block and holder (bars: 64 B, and 8 B for each
further holder).

`service`: a real router process (gRPC) over MockPrefill and MockDecode workers, which compute nothing, since real ones
would be what is measured: requests of one token that it passes, CPU for each token event with many streams, and the
same request through the router and straight to the workers. `added_real` is the last with real workers and a tiny
model.

`dynamo`: Dynamo's frontend in KV mode over its mocker workers, the same prompts, where it is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench._progress import Phases
from bench._report import JsonValue, Report, Scalar, arguments, emit, positive
from bench.index_harness import memory
from bench.router_speed_harness import dynamo, service
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.model import make
from headrace.engine.folders import models_directory

REPLICAS = (8, 100, 1000)
PAIR_BAR, FURTHER_BAR = 64.0, 8.0
DYNAMO_QUOTED = {"routing_ms_per_request": 0.108, "requests_per_s": [600, 690]}
"""Of Dynamo 1.6.1 on an idle machine of this kind, before this project (orientation)."""
SHORT_PROMPT = 900
REAL_PROMPT = 100
BACKTRACKING = 6
"""load.backtracking of the workers."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=positive, default=1_000_000, help="blocks in the index")
    parser.add_argument("--decisions", type=positive, default=5000, help="measured, for each number of replicas")
    parser.add_argument("--requests", type=positive, default=600, help="that the router passes")
    parser.add_argument("--streams", type=positive, default=64, help="at once, for the cost of a token event")
    parser.add_argument("--rounds", type=positive, default=40, help="of the added latency")
    parser.add_argument(
        "--workers", type=positive, default=8, help="half of them prefill, half decode; Dynamo's are whole"
    )
    parser.add_argument("--dynamo-python", default=sys.executable, help="an interpreter that has ai-dynamo")
    parser.add_argument("--only", choices=("decisions", "index_memory", "service", "added_real", "dynamo"))
    options = parser.parse_args(argv)
    results: dict[str, JsonValue] = {"load_average": round(os.getloadavg()[0], 2)}
    rows: list[dict[str, Scalar]] = []
    notes = ["cpu_: CPU time of the deciding thread; it is not disturbed by what else runs on the machine"]

    def wanted(part: str) -> bool:
        return options.only in (None, part)

    with Phases() as progress, tempfile.TemporaryDirectory(prefix="router-speed-") as scratch:
        if wanted("decisions"):
            decisions = []
            for replicas in REPLICAS:
                with progress.phase(f"decisions, {replicas} replicas"):
                    decisions.append(decide(replicas, options.blocks, options.decisions))
            results["decisions"] = decisions
            rows += [row for one in decisions for row in decision_rows(one)]
        if wanted("index_memory"):
            with progress.phase("index memory"):
                results["index_memory"] = index_memory(options.blocks)
        if wanted("service"):
            results["service"] = measure_service(progress, Path(scratch), options)
        if wanted("added_real"):
            results["added_real"] = measure_real(progress, min(options.rounds, 12))
        if wanted("dynamo"):
            folder = tiny_model()
            with progress.phase("Dynamo"):
                try:
                    found = dynamo.measure(
                        options.dynamo_python, folder, options.workers, 32, options.requests, SHORT_PROMPT
                    )
                    results["dynamo"] = {**asdict(found)}
                except dynamo.DynamoAbsent as absent:
                    results["dynamo"] = {"absent": str(absent)}
                    notes.append(f"Dynamo was not measured: {absent}. {dynamo.INSTALL}")
    results["dynamo_quoted"] = DYNAMO_QUOTED
    results["load_average_end"] = round(os.getloadavg()[0], 2)
    emit(Report("router_speed", results, rows, notes), as_json=options.json)


def decide(replicas: int, blocks: int, decisions: int) -> dict[str, JsonValue]:
    """In a process of its own, whose resident set is then the router's decision state alone."""
    command = [sys.executable, "-m", "bench.router_speed_harness.decision", "--replicas", str(replicas)]
    command += ["--blocks", str(blocks), "--decisions", str(decisions)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, JsonValue] = json.loads(done.stdout)
    return found


def decision_rows(found: dict[str, JsonValue]) -> list[dict[str, Scalar]]:
    """For the table."""
    rows: list[dict[str, Scalar]] = []
    for kind in ("short", "long"):
        times = found[kind]
        assert isinstance(times, dict)
        row: dict[str, Scalar] = {}
        for name, value in ({"replicas": found["replicas"]} | times).items():
            if isinstance(value, int | float):
                row[name] = value
        rows.append(row)
    return rows


def index_memory(blocks: int) -> dict[str, JsonValue]:
    """Bytes of resident memory, and whether they are under the bars."""
    found = memory.measure(blocks, 4)
    within = found.first_holder_bytes <= PAIR_BAR and found.further_holder_bytes <= FURTHER_BAR
    return {**asdict(found), "within_bars": within}


def measure_service(progress: Phases, scratch: Path, options: object) -> dict[str, JsonValue]:
    """Over mock workers, said so by the names."""
    half = max(1, options.workers // 2)  # type: ignore[attr-defined]
    rounds, requests, streams = options.rounds, options.requests, options.streams  # type: ignore[attr-defined]
    found: dict[str, JsonValue] = {
        "workers": f"{half} MockPrefill + {half} MockDecode: nothing is computed; loops hand over without gRPC"
    }
    with (
        service.mocked_cluster(scratch, half, half, commit_here=True) as cluster,
        progress.phase("requests passed", requests) as told,
    ):
        passed = service.passed(cluster, 32, requests, SHORT_PROMPT, told)
        found["passed"] = asdict(passed)
    with (
        service.mocked_cluster(scratch, half, half, step_ms=10.0, commit_here=True) as cluster,
        progress.phase("token events", 2 * streams) as told,
    ):
        cpu_ms = passed.router_cpu_ms_per_request
        found["token_events"] = asdict(service.events(cluster, streams, 200, SHORT_PROMPT, cpu_ms, told))
    with service.mocked_cluster(scratch, 1, 1, step_ms=2.0) as cluster:
        workers = service.known_workers(cluster, "Mock-prefill-0", "Mock-decode-0")
        with progress.phase("added latency, mock workers", rounds) as told:
            found["added_mock"] = asdict(service.added(cluster, workers, rounds, SHORT_PROMPT, 16, told))
    return found


def measure_real(progress: Phases, rounds: int) -> dict[str, JsonValue]:
    """With one prefill and one decode worker and the tiny model."""
    folder = tiny_model()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    keep_tokens = config.get("text_config", config)["sliding_window"] + 2 * BACKTRACKING
    with LocalCluster(ClusterSpec(folder, {"prefill": 1, "decode": 1})) as cluster:
        workers = service.known_workers(cluster, "prefill-0", "decode-0")
        with progress.phase("added latency, real workers", rounds) as told:
            return {**asdict(service.added(cluster, workers, rounds, REAL_PROMPT, 8, told, keep_tokens))}


def tiny_model() -> Path:
    """Random weights, every mechanism; made where it is missing."""
    return make("deepseek-v41-tiny", models_directory(), 0)


if __name__ == "__main__":
    main()
