"""`headrace simulate`: scores of routers on a trace, or one run at a given load, in simulated time."""

from __future__ import annotations

import hashlib
import json
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from headrace.cli import simulate_report as report
from headrace.cli.exits import CliError, Exit
from headrace.cli.progress import progress_bar
from headrace.cli.ranges import require_within
from headrace.cli.simulate_search import Cell, search_all, worker_count, worker_pool
from headrace.cli.simulate_work import Job, load_trace, run
from headrace.compiler import NativeUnavailable
from headrace.router.native.build import load_native
from headrace.router.simulate import engine_file, plots, scenario
from headrace.router.simulate.policies import OURS, POLICIES, SAME_DECODE
from headrace.router.simulate.run import Times
from headrace.router.simulate.scenario import Scenario, ScenarioError
from headrace.router.simulate.score import search
from headrace.router.simulate.spec import Cluster, Store
from headrace.router.simulate.traces import TraceError
from headrace.router.simulate.workload import WorkloadError

MODES = ("prefill", "decode", "joint")
BARS = {"prefill": 0.92, "decode": 0.97, "joint": 0.92}
"""What this project holds itself to, on the conversation trace at 64 + 64 ranks."""
BARS_UNIT = "64+64"
BARS_TRACE = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
"""SHA-256 of that trace's file: Mooncake's conversation trace."""
DEFAULT_LOAD = 0.85
SEEDS = 3
LONGEST_S, MOST_LOAD, MOST_GBIT_S = 1e7, 1e3, 1e9
QUICK_S = 30.0
QUICK_POLICIES = (OURS, "round_robin")
GUESSES = {
    "prefill": {OURS: 95, "lambda_1": 93, "dynamo": 93, "sticky": 85, "least_loaded": 84, "round_robin": 78},
    "decode": {OURS: 98, "dynamo": 83, "least_loaded": 94, "round_robin": 87},
    "joint": {OURS: 95, "lambda_1": 93, "dynamo": 93, "sticky": 85, "least_loaded": 84, "round_robin": 78},
}
"""Where searches begin, in steps. A wrong guess costs runs and changes no score."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The command's flags."""

    unit: str
    trace: Path | None
    modes: tuple[str, ...] = MODES
    policies: tuple[str, ...] = ()
    seeds: int = SEEDS
    warmup_s: float = 80.0
    measured_s: float = 60.0
    load: float | None = None
    scenario: Path | None = None
    engine: Path | None = None
    cache_blocks: int | None = None
    store_gbit_s: float | None = None
    decode_group: int | None = None
    quick: bool = False
    jobs: int | None = None
    plots: Path | None = None
    as_json: bool = False


def simulate(options: SimulateOptions) -> int:
    """Run it and print the result; the exit status. Raises CliError."""
    if options.plots is not None:
        _plots_ready(options.plots)
    _numbers(options)
    base, trace = cluster_of(options), _trace(options)
    for name in options.policies:
        if name not in POLICIES:
            raise CliError(f"--policy {name} is none of {', '.join(POLICIES)}")
    for mode in options.modes:
        if mode not in MODES:
            raise CliError(f"--mode {mode} is none of {', '.join(MODES)}")
    single = options.load is not None or options.scenario is not None
    if single:
        _of_one_run(options)
    try:
        load_native()
    except NativeUnavailable as reason:
        Console(stderr=True).print(f"Python decides, which takes several times as long: {reason}", highlight=False)
    began = time.monotonic()
    try:
        document = _single(options, base, trace) if single else _scores(options, base, trace)
    except (WorkloadError, ScenarioError) as error:
        raise CliError(str(error)) from error
    document |= {"seconds": round(time.monotonic() - began, 1), "processor_seconds": round(_worked(), 1)}
    if options.plots is not None:
        document |= {"plots": [str(path) for path in report.draw(document, options.plots)]}
    if options.as_json:
        print(json.dumps(document, allow_nan=False))
    else:
        report.show(document, Console())
    if document["problems"]:
        raise CliError(f"the books do not balance: {'; '.join(document['problems'])}", Exit.FAILED)
    return Exit.DONE


def _numbers(options: SimulateOptions) -> None:
    require_within("--warmup", options.warmup_s, 0.0, LONGEST_S)
    require_within("--measure", options.measured_s, 0.0, LONGEST_S)
    if options.load is not None:
        require_within("--load", options.load, 0.0, MOST_LOAD)
    if options.store_gbit_s is not None:
        require_within("--store", options.store_gbit_s, 0.0, MOST_GBIT_S)


def _of_one_run(options: SimulateOptions) -> None:
    """Raises CliError for flags that one run cannot obey."""
    if options.quick or options.seeds != SEEDS:
        raise CliError("--load and --scenario are one run with one seed; --seeds and --quick are for scores")
    if options.modes != MODES and len(options.modes) > 1:
        raise CliError("--load and --scenario are one run; give one --mode")


def _worked() -> float:
    """Processor time of this process and of its workers, which have ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def cluster_of(options: SimulateOptions) -> Cluster:
    """The cluster of the flags. Raises CliError."""
    prefill, plus, decode = options.unit.partition("+")
    if not plus or not prefill.isdecimal() or not decode.isdecimal():
        raise CliError(f"--unit {options.unit} is not PREFILL+DECODE ranks, such as 64+64")
    cluster = Cluster(int(prefill), int(decode)) if int(prefill) + int(decode) else None
    if cluster is None:
        raise CliError("--unit 0+0 has no ranks")
    try:
        if options.decode_group is not None:
            cluster = replace(cluster, ranks_per_decode_replica=options.decode_group)
        if options.engine is not None:
            one, other = engine_file.parse(_text("--engine", options.engine))
            cluster = replace(cluster, prefill=one, decode=other)
        if options.store_gbit_s is not None:
            cluster = replace(cluster, store=Store(bytes_per_s=options.store_gbit_s * 1e9 / 8))
        return replace(cluster, cache_blocks=options.cache_blocks)
    except ValueError as error:
        raise CliError(str(error)) from error


def one_side(cluster: Cluster, mode: str) -> Cluster:
    """The cluster of a mode: both sides, or one alone."""
    if mode == "prefill":
        return replace(cluster, decode_ranks=0, ranks_per_decode_replica=None)
    if mode == "decode":
        return replace(cluster, prefill_ranks=0, ranks_per_prefill_replica=1)
    return cluster


def _modes(options: SimulateOptions, cluster: Cluster) -> list[str]:
    sides = {"prefill": cluster.prefill_ranks > 0, "decode": cluster.decode_ranks > 0}
    sides["joint"] = all(sides.values())
    modes = [mode for mode in options.modes if sides[mode]]
    if not modes:
        raise CliError(f"--unit {options.unit} has no ranks for --mode {', '.join(options.modes)}")
    return modes


def _trace(options: SimulateOptions) -> Path:
    if options.trace is None:
        raise CliError(
            "--trace FILE is missing: a public request trace (docs/tune.md), or one of your own in such a format"
        )
    path = options.trace.resolve()
    try:
        load_trace(path)
    except OSError as error:
        raise CliError(f"--trace {options.trace}: {error.strerror}") from error
    except (TraceError, WorkloadError) as error:
        raise CliError(f"--trace {error}") from error
    return path


def _text(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{flag} {path}: {error}") from error


def _plots_ready(folder: Path) -> None:
    try:
        plots.require()
        folder.mkdir(parents=True, exist_ok=True)
    except (plots.PlotsUnavailable, OSError) as error:
        raise CliError(f"--plots {folder}: {error}") from error


def _single(options: SimulateOptions, cluster: Cluster, trace: Path) -> report.Document:
    """Every policy once at a given load, with the scenario, to the end of the last request."""
    script = Scenario()
    if options.scenario is not None:
        text = _text("--scenario", options.scenario)
        script = scenario.parse(text, is_json=options.scenario.suffix == ".json")
    mode = _modes(options, cluster)[-1]
    times = Times(options.warmup_s, options.measured_s)
    policies = options.policies or (OURS,)
    load = DEFAULT_LOAD if options.load is None else options.load
    jobs = [Job(trace, one_side(cluster, mode), policy, load, 1, times, script, drain=True) for policy in policies]
    with worker_pool(options.jobs) as pool, progress_bar() as progress:
        task = progress.add_task(f"{mode} at {load:g}", total=len(jobs))
        results = []
        for outcome in pool.map(run, jobs):
            results.append(outcome)
            progress.advance(task)
    return report.single(options.unit, mode, load_trace(trace), dict(zip(policies, results, strict=True)))


def _scores(options: SimulateOptions, cluster: Cluster, trace: Path) -> report.Document:
    """Every policy in every mode."""
    seeds = list(range(1, 2 if options.quick else options.seeds + 1))
    times = Times(options.warmup_s, min(options.measured_s, QUICK_S) if options.quick else options.measured_s)
    policies = options.policies or (QUICK_POLICIES if options.quick else tuple(POLICIES))
    modes = _modes(options, cluster)
    cells = [
        Cell(mode, policy, one_side(cluster, mode), search(seeds, GUESSES[mode].get(policy, 85)))
        for mode in sorted(modes, key=lambda mode: mode != "joint")  # the long ones first
        for policy in policies
        if mode != "decode" or SAME_DECODE.get(policy) not in policies
    ]
    with worker_pool(options.jobs) as pool, progress_bar() as progress:
        search_all(cells, pool, trace, times, worker_count(options.jobs), progress)
    found = {mode: {cell.policy: cell for cell in cells if cell.mode == mode} for mode in modes}
    if "decode" in found:
        same = {policy: SAME_DECODE[policy] for policy in policies if SAME_DECODE.get(policy) in policies}
        found["decode"] |= {policy: found["decode"][other] for policy, other in same.items()}
    return report.scored(options.unit, load_trace(trace), found, bars_of(options, trace), seeds, times)


def bars_of(options: SimulateOptions, trace: Path) -> dict[str, float]:
    """What the project holds itself to, if this is the measurement that it is said of; else nothing."""
    usual = SimulateOptions(options.unit, options.trace)
    whole = not options.quick and all(
        getattr(options, name) >= getattr(usual, name) for name in ("seeds", "warmup_s", "measured_s")
    )
    same = all(
        getattr(options, name) == getattr(usual, name)
        for name in ("engine", "cache_blocks", "store_gbit_s", "decode_group")
    )
    if options.unit != BARS_UNIT or not whole or not same:
        return {}
    with trace.open("rb") as file:
        return BARS if hashlib.file_digest(file, "sha256").hexdigest() == BARS_TRACE else {}
