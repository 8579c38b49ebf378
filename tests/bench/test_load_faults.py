"""bench.load_faults: what is promised of a faulty rank, under the simulated clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.load_faults import broken
from bench.load_faults_harness.mock_reports import LIES, MockReports
from bench.load_faults_harness.simulated import FAULTS, Simulated
from headrace.engine.messages import EngineStatus
from headrace.router.topology import Role
from headrace.v1 import common_pb2


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_rank_gets_neither_all_nor_what_it_asks_for(fault: str, role: Role) -> None:
    """L11, L15, L21, L22: stale, absurd or too good reports, slowness and death; everything ends, nothing is left."""
    run = Simulated(fault, role, ranks=4, requests=300, seed=3).run()
    assert broken(run) == []
    assert run.before.requests + run.during.requests + run.after.requests >= 240


def test_a_dead_rank_is_left_and_its_next_life_readmitted() -> None:
    """L14, L15: what was there is sent again; the restarted replica gets its share."""
    run = Simulated("dead", Role.PREFILL, ranks=4, requests=400, seed=3).run()
    assert run.during.faulty_share < 0.2 * run.fair_share + 0.02
    assert run.after.faulty_share > 0.5 * run.fair_share


@pytest.mark.parametrize("pace", [0.2, 1.0, 10.0])
def test_engines_unlike_the_prior_share_evenly_from_the_first_request(pace: float) -> None:
    """L21: the error of the prior is no slowness of the rank that shows it first; without a fault all are alike."""
    for role in (Role.PREFILL, Role.DECODE):
        simulated = Simulated("none", role, ranks=2, requests=120, seed=1, pace=pace)
        simulated.run()
        for phase in simulated.shares():
            assert min(phase.values()) > 0.25 * sum(phase.values())
            assert len(phase) == 2


def test_the_same_seed_is_the_same_run() -> None:
    runs = [Simulated("slow", Role.DECODE, ranks=3, requests=90, seed=5).run() for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_run_that_breaks_a_promise_is_told() -> None:
    run = Simulated("idle", Role.DECODE, ranks=3, requests=90, seed=5).run()
    bad = replace(run, unfinished=1, left_in_flight=2, during=replace(run.during, faulty_share=1.0))
    assert len(broken(bad)) == 3


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_no_honest_report(lie: str) -> None:
    told = iter((common_pb2.LoadReport(step=1, rows_used=3), common_pb2.LoadReport(step=9, rows_used=5)))
    mock = MockReports(lie, lambda status, rank: next(told))
    status: EngineStatus = object()  # type: ignore[assignment]
    first, second = mock(status), mock(status)
    if lie == "frozen":
        assert first == second
    elif lie == "idle":
        assert (second.step, second.rows_used) == (9, 0)
    else:
        assert second.rows_used > 1 << 30
