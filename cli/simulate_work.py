"""One run of a simulation, in a process of its own if need be: what is asked travels as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from headrace.router.simulate.offline import at_load
from headrace.router.simulate.policies import POLICIES
from headrace.router.simulate.run import Outcome, Times, simulate
from headrace.router.simulate.scenario import NOTHING, Scenario
from headrace.router.simulate.spec import Cluster
from headrace.router.simulate.traces import read_trace
from headrace.router.simulate.workload import Superposition, TraceColumns, columns


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is asked for."""

    trace: Path
    cluster: Cluster
    policy: str
    load: float
    seed: int
    times: Times
    scenario: Scenario = NOTHING
    give_up: bool = False
    drain: bool = False


@lru_cache(maxsize=2)
def load_trace(path: Path) -> TraceColumns:
    """The trace of a file. Raises TraceError, WorkloadError, OSError."""
    return columns(read_trace(path))


@lru_cache(maxsize=4)
def _superposition(path: Path, seed: int, seconds: float) -> Superposition:
    return Superposition(load_trace(path), seed, seconds)


def run(job: Job) -> Outcome:
    """Do it. Raises WorkloadError, ScenarioError."""
    copies = _superposition(job.trace, job.seed, job.times.arrivals_s)
    workload = at_load(copies, job.cluster.unit, job.load, job.times.warmup_s, job.times.end_s)
    return simulate(
        workload,
        job.cluster,
        POLICIES[job.policy],
        job.times,
        seed=job.seed,
        scenario=job.scenario,
        give_up=job.give_up,
        drain=job.drain,
    )
