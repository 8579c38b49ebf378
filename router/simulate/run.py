"""One simulation from its first request to its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.router.simulate import books
from headrace.router.simulate.chaos import Chaos
from headrace.router.simulate.cluster import Simulation
from headrace.router.simulate.measure import OBJECTIVES, Measured, Objectives, Recorder
from headrace.router.simulate.offline import Bound, bound
from headrace.router.simulate.request import SimRequest
from headrace.router.simulate.routing import SimRouter
from headrace.router.simulate.scenario import NOTHING, Scenario
from headrace.router.simulate.spec import Cluster
from headrace.router.simulate.workload import Workload, walk

GRACE_S = 4.5
"""Requests come on so long after the last measured one, which has had its chance of a first token then."""
GROWTH = 0.01
"""A backlog grows when more than this share of the offered work is left behind: one step of the loads tried."""
LONGEST_DRAIN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Times:
    """Of a run, in simulated seconds."""

    warmup_s: float = 80.0
    measured_s: float = 60.0

    @property
    def end_s(self) -> float:
        """Of the measured part."""
        return self.warmup_s + self.measured_s

    @property
    def arrivals_s(self) -> float:
        """How long requests arrive."""
        return self.end_s + GRACE_S


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's result."""

    offered: float
    """Load: the perfectly balanced time of the measured requests ÷ the time in which they came."""
    copies: float
    bound: Bound
    measured: Measured
    passed: bool
    hopeless: bool
    """It was broken off, since it could not pass any more."""
    arrivals: int
    ends: dict[str, int]
    rejections: int
    failed_attempts: int
    problems: tuple[str, ...]
    """Of conservation, after everything has drained (L11); empty also when that was not asked for."""
    log: tuple[str, ...]
    """What the scenario did."""


def simulate(
    workload: Workload,
    cluster: Cluster,
    make_router: Callable[[Cluster, int], SimRouter],
    times: Times,
    *,
    seed: int = 0,
    scenario: Scenario = NOTHING,
    aims: Objectives = OBJECTIVES,
    give_up: bool = False,
    drain: bool = False,
    tick: Callable[[float], None] = lambda now: None,
) -> Outcome:
    """Run a workload. `make_router`: given the cluster and the tokens of a block. `give_up`: stop when it cannot pass
    any more. `drain`: when the last request has come, go on until nothing is left and look at the books, with `give_up`
    only if it has passed. `tick`: told the simulated time about once a second of it. Raises ScenarioError, RuntimeError
    for a drain that does not end."""
    trace = workload.trace
    simulation = Simulation(cluster, make_router(cluster, trace.block_tokens), trace.block_tokens, seed)
    chaos = Chaos(simulation, scenario)
    part = workload.between(times.warmup_s, times.end_s)
    ideal = bound(part, cluster.unit)
    recorder = Recorder(simulation, times.warmup_s, times.end_s, len(part), aims)
    hopeless = _feed(simulation, workload, recorder, times, give_up, tick)
    if not hopeless:
        simulation.clock.run(times.arrivals_s)
    measured = recorder.measured(ideal.batch_s)
    passed = not hopeless and keeps(measured, aims)
    problems: list[str] = []
    if drain and (passed or not give_up):
        _drain(simulation, tick)
        problems = books.problems(simulation)
    return Outcome(
        offered=ideal.seconds / times.measured_s,
        copies=workload.copies,
        bound=ideal,
        measured=measured,
        passed=passed,
        hopeless=hopeless,
        arrivals=simulation.accepted,
        ends={end.value: count for end, count in simulation.ends.items()},
        rejections=simulation.rejections,
        failed_attempts=simulation.failed_attempts,
        problems=tuple(problems),
        log=tuple(chaos.log),
    )


def keeps(measured: Measured, aims: Objectives) -> bool:
    """Whether a run kept the objectives: p99 of TTFT and TPOT, nobody turned away beyond that, no growing backlog."""
    return (
        measured.ttft.p99 <= aims.ttft_s
        and (measured.tpot is None or measured.tpot.p99 <= aims.tpot_s)
        and measured.backlog_growth <= GROWTH
    )


def _feed(
    simulation: Simulation,
    workload: Workload,
    recorder: Recorder,
    times: Times,
    give_up: bool,
    tick: Callable[[float], None],
) -> bool:
    """Let all requests arrive; True when it was given up."""
    clock, told = simulation.clock, 0.0
    keyed = simulation.cluster.prefill_ranks > 0
    for number, (at, prompt, output, keys) in enumerate(walk(workload, keyed=keyed)):
        if at >= times.arrivals_s:
            break
        clock.run(at)
        simulation.arrive(SimRequest(number, at, prompt, output, keys))
        if at - told >= 1.0:
            told = at
            tick(at)
            if give_up and at > times.warmup_s and recorder.hopeless():
                return True
    return False


def _drain(simulation: Simulation, tick: Callable[[float], None]) -> None:
    latest = simulation.clock.now + LONGEST_DRAIN_S
    while not simulation.drained:
        if simulation.clock.now > latest:
            raise RuntimeError(f"{len(simulation.live)} requests still run {LONGEST_DRAIN_S:.0f} s after the last came")
        simulation.clock.run(simulation.clock.now + 1.0)
        tick(simulation.clock.now)
    # What is still on its way to the router: cache events, the sight of a death.
    simulation.clock.run(simulation.clock.now + 2 * simulation.cluster.detect_s + 1.0)
