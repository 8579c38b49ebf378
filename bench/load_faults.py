"""A replica that reports stale or absurd load, one that answers slowly, one that dies: the others' share and latency.

    python -m bench.load_faults --json

`simulated`: the router's own objects under a simulated clock, eight ranks of each role, one of them faulty for the
middle third of the run; shares are exact and the same on every machine. Lies: `idle` (nothing ever runs there),
`frozen` (the last report over and over), `absurd` (more than fits); `slow` computes four times as long, `dead` is gone
and returns.

`cluster`: real processes and a tiny model; a worker that lies (MockReports in a process of its own) and is killed; one
that is stopped four fifths of the time; a prefill worker that is killed. Its times are those of a machine that may be
shared.

Checked, as ratios: the faulty rank never gets more than twice its fair share, however idle it says it is, and a liar
gets at least a quarter of it; the healthy ones' p99 stays within a factor; every request ends; nothing is left in
flight.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from bench._progress import Phases
from bench._report import JsonValue, Report, Scalar, arguments, emit, positive
from bench.load_faults_harness import cluster
from bench.load_faults_harness.mock_reports import LIES
from bench.load_faults_harness.simulated import FAULTS, Run, Simulated
from bench.router_speed import tiny_model
from headrace.router.topology import Role

MOST_SHARE, LEAST_SHARE = 2.0, 0.25
"""Of a faulty rank, as parts of the fair share; the least is asked of liars only."""
MOST_SLOWDOWN = 2.5
"""Of the healthy ranks' p99 time to first token while one of eight is faulty."""
CLUSTER_SLOWDOWN = 8.0
"""The same for the median on a real cluster of two to three workers on a shared machine."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--simulated-requests", type=positive, default=1500)
    parser.add_argument("--ranks", type=positive, default=8)
    parser.add_argument("--requests", type=int, default=24, help="in each phase on the real cluster; 0: no cluster")
    parser.add_argument("--lie", choices=LIES, default="absurd", help="of the real liar")
    options = parser.parse_args(argv)
    results: dict[str, JsonValue] = {"load_average": round(os.getloadavg()[0], 2)}
    failures: list[str] = []
    rows: list[dict[str, Scalar]] = []
    with Phases() as progress:
        runs = []
        with progress.phase("simulated", 2 * len(FAULTS)) as told:
            for role in (Role.PREFILL, Role.DECODE):
                for fault in FAULTS:
                    runs.append(Simulated(fault, role, options.ranks, options.simulated_requests, 1).run())
                    told()
        results["simulated"] = [asdict(run) for run in runs]
        rows = [row(run) for run in runs]
        failures += [f"{run.role} {run.fault}: {what}" for run in runs for what in broken(run)]
        if options.requests:
            found = cluster.measure(tiny_model(), options.requests, options.lie, progress)
            results["cluster"] = {**asdict(found)}
            failures += cluster_broken(found)
    results["failures"] = failures
    notes = [
        "share: of the requests sent in the middle third; fair = 1 / ranks",
        "healthy_ttft_p99_s: of requests that the faulty rank had no part in, before and during",
    ]
    emit(Report("load_faults", results, rows, notes), as_json=options.json)
    sys.exit(1 if failures else 0)


def row(run: Run) -> dict[str, Scalar]:
    """For the table."""
    return {
        "role": run.role,
        "fault": run.fault,
        "fair": run.fair_share,
        "share_before": run.before.faulty_share,
        "share_during": run.during.faulty_share,
        "share_after": run.after.faulty_share,
        "healthy_p99_before_s": run.before.healthy_ttft_p99_s,
        "healthy_p99_during_s": run.during.healthy_ttft_p99_s,
        "sent_again": run.before.lost + run.during.lost + run.after.lost,
    }


def broken(run: Run) -> list[str]:
    """Promises that a simulated run did not keep."""
    found = []
    during = run.during.faulty_share / run.fair_share
    if during > MOST_SHARE:
        found.append(f"the faulty rank got {during:.2f} fair shares")
    if run.fault in LIES and during < LEAST_SHARE:
        found.append(f"a liar got {during:.2f} fair shares")
    if run.during.healthy_ttft_p99_s > MOST_SLOWDOWN * run.before.healthy_ttft_p99_s:
        found.append("the healthy ranks became slow")
    if run.unfinished:
        found.append(f"{run.unfinished} requests never ended")
    if run.left_in_flight:
        found.append(f"{run.left_in_flight} pieces of work are left in flight")
    return found


def cluster_broken(found: cluster.Report) -> list[str]:
    """Promises that the real cluster did not keep."""
    failures = []
    before = found.phases[0]
    for phase in found.phases:
        if phase.ended_with_error > cluster.CLIENTS:
            failures.append(f"{phase.name}: {phase.ended_with_error} requests failed: {phase.errors}")
        if phase.ttft_p50_ms > CLUSTER_SLOWDOWN * before.ttft_p50_ms:
            failures.append(f"{phase.name}: the median first token came after {phase.ttft_p50_ms} ms")
        for name, replica in phase.decode.items():
            if len(phase.decode) > 1 and replica.share > MOST_SHARE / len(phase.decode):
                failures.append(f"{phase.name}: {name} got {replica.share:.2f} of all requests")
    if found.live_at_the_end:
        failures.append(f"{found.live_at_the_end} requests are live at the end")
    failures += [f"the router says: {problem}" for problem in found.problems]
    return failures


if __name__ == "__main__":
    main()
