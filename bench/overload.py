"""Twice the capacity offered for a minute: who is accepted keeps the pace, the others are told when to come back (L12).

    python -m bench.overload --json
    python -m bench.overload --seconds 10 --json     # the short form

Real processes of one cluster: a router, a prefill and a decode of 8 slots, with defaults but for the size of the queue.
First 8 clients keep all slots busy: so many requests a second is the capacity, and their time per token the pace. Then
twice as many requests arrive, at random times, whatever becomes of those before. Then one request at a time, until its
first token comes as fast as before all this.

`tpot_ratio` compares the median time per token of accepted requests with the pace; `goodput_ratio` what finishes a
second with the capacity, `goodput_least` the worst five seconds of it; `rss_ratio` is the largest growth of a process
while requests arrive; `recovery_s` runs from the last arrival. `cpu_s` is CPU time for each request that finished, of
all processes and the clients; `cpu_shares` say how much of the CPU time that was taken in both phases was the bench's:
well below 1, others used the machine, and times say little.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from bench._progress import Phases
from bench._report import JsonValue, Report, Scalar, arguments, emit
from bench.overload_harness.clients import Outcomes, keep_busy, offer, one_at_a_time, open_client, recovery
from bench.overload_harness.processes import CpuMark, MemoryWatch
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.model import make

SLOTS, QUEUE, FACTOR = 8, 16, 2.0
LIMITS = {"tpot_ratio": 1.25, "goodput_ratio": 0.9, "rss_ratio": 1.05, "recovery_s": 10.0}
SETS = (
    f"engine.max_sequences={SLOTS}",
    "engine.kv_bytes=16777216",
    "load.block_tokens=16",
    "load.native_kernels=false",
    f"admission.max_waiting={QUEUE}",
)


async def measure(cluster: LocalCluster, seconds: float, calibrate: float) -> dict[str, JsonValue]:
    """All three phases; the report's fields."""
    pids = {child.name: child.pid for child in cluster.children}
    async with open_client(cluster.router) as stub:
        alone = await one_at_a_time(stub, 3)
        mark = CpuMark.take(pids)
        busy = await keep_busy(stub, SLOTS, calibrate)
        busy_cpu = CpuMark.take(pids).since(mark)
        capacity = len(busy.finished) / busy.seconds
        memory = MemoryWatch(pids)
        watching = asyncio.create_task(memory.run())
        mark = CpuMark.take(pids)
        over = await offer(stub, FACTOR * capacity, seconds)
        over_cpu, finished = CpuMark.take(pids).since(mark), len(over.finished)
        watching.cancel()
        recovered = await recovery(stub, over, 2 * alone)
        await over.settle()
        await asyncio.gather(watching, return_exceptions=True)
    goodput = over.goodput(capacity)
    ratios = memory.growth()
    results: dict[str, JsonValue] = {
        "capacity_rps": round(capacity, 2),
        "offered_rps": round(FACTOR * capacity, 2),
        "seconds": seconds,
        **_counts(over),
        "tpot_ms_at_capacity": round(busy.tpot_ms(), 2),
        "tpot_ms": round(over.tpot_ms(), 2),
        "tpot_ratio": round(over.tpot_ms() / busy.tpot_ms(), 3),
        "goodput_rps": round(goodput.mean * capacity, 2),
        "goodput_ratio": round(goodput.mean, 3),
        "goodput_least": round(goodput.least, 3),
        "cpu_s_at_capacity": round(busy_cpu.own / len(busy.finished), 4),
        "cpu_s": round(over_cpu.own / max(1, finished), 4),
        "cpu_shares": [round(busy_cpu.share, 2), round(over_cpu.share, 2)],
        "rss_ratio": round(max(ratios.values()), 3),
        "rss_ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "recovery_s": round(recovered, 2),
    }
    results["holds"] = holds(results)
    return results


def _counts(over: Outcomes) -> dict[str, JsonValue]:
    return {
        "offered": over.offered,
        "finished": len(over.finished),
        "refused": len(over.refused),
        "refused_without_time": sum(time_s is None or time_s <= 0 for time_s in over.refused),
        "failed": len(over.failed),
        "failures": sorted(set(over.failed))[:5],
    }


def holds(results: dict[str, JsonValue]) -> bool:
    """Whether everything is within LIMITS."""
    found = {name: _number(results, name) for name in (*LIMITS, "failed", "refused", "refused_without_time")}
    return (
        found["failed"] == found["refused_without_time"] == 0
        and found["refused"] > 0
        and found["tpot_ratio"] <= LIMITS["tpot_ratio"]
        and found["goodput_ratio"] >= LIMITS["goodput_ratio"]
        and found["rss_ratio"] <= LIMITS["rss_ratio"]
        and found["recovery_s"] <= LIMITS["recovery_s"]
    )


def _number(results: dict[str, JsonValue], name: str) -> float:
    value = results[name]
    assert isinstance(value, int | float)
    return float(value)


def run(seconds: float, calibrate: float, folder: Path, run_dir: Path) -> dict[str, JsonValue]:
    """One cluster, one measurement."""
    with LocalCluster(ClusterSpec(folder, sets=SETS), run_dir=run_dir) as cluster:
        return asyncio.run(measure(cluster, seconds, calibrate))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--calibrate", type=float, default=15.0, help="seconds in which the capacity is found")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="headrace-overload-") as scratch,
        Phases() as phases,
        phases.phase("overload"),
    ):
        folder = make("deepseek-v41-tiny", Path(scratch) / "models", 0)
        results = run(options.seconds, options.calibrate, folder, Path(scratch) / "run")
    rows: list[dict[str, Scalar]] = [
        {"what": name, "value": _number(results, name), "limit": limit} for name, limit in LIMITS.items()
    ]
    emit(Report("overload", results, rows), as_json=options.json)
    return 0 if results["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
