"""Whole clusters in simulated time: books, repeatability, faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.router.cost.loading import Source
from headrace.router.simulate.headrace_router import HeadraceRouter
from headrace.router.simulate.measure import growth
from headrace.router.simulate.offline import at_load
from headrace.router.simulate.policies import POLICIES
from headrace.router.simulate.run import Outcome, Times, simulate
from headrace.router.simulate.scenario import NOTHING, Scenario, ScenarioError, parse
from headrace.router.simulate.spec import Cluster, Store
from headrace.router.simulate.workload import Superposition, TraceColumns

TIMES = Times(warmup_s=8.0, measured_s=8.0)
CLUSTER = Cluster(4, 4)
SINGLE = replace(CLUSTER, ranks_per_decode_replica=1)


def run(
    trace: TraceColumns,
    cluster: Cluster = CLUSTER,
    policy: str = "headrace",
    load: float = 0.7,
    seed: int = 1,
    scenario: Scenario = NOTHING,
) -> Outcome:
    copies = Superposition(trace, seed, TIMES.arrivals_s)
    workload = at_load(copies, cluster.unit, load, TIMES.warmup_s, TIMES.end_s)
    return simulate(workload, cluster, POLICIES[policy], TIMES, seed=seed, scenario=scenario, drain=True)


def events(text: str) -> Scenario:
    return parse(text, is_json=False)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_has_one_end_and_nothing_is_left(trace: TraceColumns, policy: str) -> None:
    """L11, L28: at the end the engines, the fleet and all books read zero."""
    outcome = run(trace, policy=policy)
    assert outcome.problems == ()
    assert outcome.ends == {"finished": outcome.arrivals, "failed": 0, "refused": 0}
    assert outcome.offered == pytest.approx(0.7, rel=0.01)
    assert outcome.measured.requests > 50


@pytest.mark.parametrize(("prefill", "decode"), [(4, 0), (0, 4)])
def test_one_side_alone(trace: TraceColumns, prefill: int, decode: int) -> None:
    outcome = run(trace, Cluster(prefill, decode))
    assert outcome.problems == ()
    spreads = {"prefill_tokens", "attention"} if prefill else {"decode_kv", "decode_requests"}
    assert set(outcome.measured.spreads) == spreads
    assert (outcome.measured.tpot is None) == (decode == 0)
    assert (outcome.measured.hit_ratio > 0) == (prefill > 0)


def test_the_same_seed_is_the_same_run(trace: TraceColumns) -> None:
    one, same, other = run(trace), run(trace), run(trace, seed=2)
    assert one == same
    assert one.measured != other.measured


def test_a_lighter_load_is_never_slower_and_never_above_the_bound(trace: TraceColumns) -> None:
    light, heavy = run(trace, load=0.4), run(trace, load=1.3)
    assert light.passed
    assert not heavy.passed
    assert light.measured.ttft.p99 < heavy.measured.ttft.p99
    assert heavy.measured.backlog_growth > 0.1
    assert light.measured.hit_ratio <= light.bound.hit_ratio + 0.02


def test_a_hopeless_run_is_broken_off(trace: TraceColumns) -> None:
    copies = Superposition(trace, 1, TIMES.arrivals_s)
    workload = at_load(copies, CLUSTER.unit, 2.0, TIMES.warmup_s, TIMES.end_s)
    outcome = simulate(workload, CLUSTER, POLICIES["round_robin"], TIMES, give_up=True)
    assert outcome.hopeless
    assert not outcome.passed
    assert outcome.arrivals < len(workload)


def test_cache_limits_and_a_store_change_hits(trace: TraceColumns) -> None:
    infinite = run(trace, Cluster(4, 0)).measured
    small = run(trace, Cluster(4, 0, cache_blocks=40)).measured
    stored = run(trace, Cluster(4, 0, cache_blocks=40, store=Store())).measured
    assert small.hit_ratio < infinite.hit_ratio
    assert stored.hit_ratio > small.hit_ratio
    assert stored.loaded_ratio > 0 == infinite.loaded_ratio


def test_the_router_learns_what_loading_takes(trace: TraceColumns) -> None:
    """As the service does, from what prefill reports at the hand-over."""
    cluster = Cluster(4, 0, cache_blocks=40, store=Store(bytes_per_s=2e9))
    router = HeadraceRouter(cluster, trace.block_tokens)
    before = router.rates.rate(Source.SHARED)
    copies = Superposition(trace, 1, TIMES.arrivals_s)
    simulate(
        at_load(copies, cluster.unit, 0.7, TIMES.warmup_s, TIMES.end_s), cluster, lambda *_: router, TIMES, drain=True
    )
    assert router.rates.rate(Source.SHARED) > 2 * before


def test_a_run_that_gives_up_drains_only_if_it_has_passed(trace: TraceColumns) -> None:
    """So that a search repeats no run for the sake of its books (L11)."""
    copies = Superposition(trace, 1, TIMES.arrivals_s)
    for load, passes in ((0.6, True), (1.1, False)):
        workload = at_load(copies, CLUSTER.unit, load, TIMES.warmup_s, TIMES.end_s)
        outcome = simulate(workload, CLUSTER, POLICIES["headrace"], TIMES, give_up=True, drain=True)
        assert outcome.passed == passes
        assert (sum(outcome.ends.values()) == outcome.arrivals) == passes


def test_a_dead_prefill_s_requests_go_elsewhere(trace: TraceColumns) -> None:
    """L16: a retry is a new attempt; L15: nobody sees the death of a prefill but in his TTFT."""
    outcome = run(trace, scenario=events('[[event]]\nat = 9.0\ndo = "die"\nreplica = "prefill-1"\n'))
    assert outcome.failed_attempts > 0
    assert outcome.ends == {"finished": outcome.arrivals, "failed": 0, "refused": 0}
    assert outcome.problems == ()
    assert outcome.log == ("9.00 s: die prefill-1",)
    assert outcome.measured.shares["prefill"][1] < min(
        share for rank, share in enumerate(outcome.measured.shares["prefill"]) if rank != 1
    )


@pytest.mark.parametrize("continuation", [False, True])
def test_a_dead_decode_ends_its_streams_or_they_go_on(trace: TraceColumns, continuation: bool) -> None:
    """L15, L28: a stream that has begun ends with an error, or goes on elsewhere; never both, never twice."""
    cluster = replace(SINGLE, continuation=continuation)
    script = events(
        '[[event]]\nat = 9.0\ndo = "die"\nreplica = "decode-2"\n'
        '[[event]]\nat = 12.0\ndo = "return"\nreplica = "decode-2"\n'
    )
    outcome = run(trace, cluster, scenario=script)
    assert outcome.problems == ()
    assert sum(outcome.ends.values()) == outcome.arrivals
    assert (outcome.ends["failed"] == 0) == continuation
    assert outcome.failed_attempts > 0


@pytest.mark.parametrize("returns", [False, True])
def test_a_run_goes_on_without_any_decode_replica(trace: TraceColumns, returns: bool) -> None:
    """L11, L28: what cannot be served has its end too, and there is nothing to compare."""
    text = '[[event]]\nat = 7.5\ndo = "die"\nreplica = "decode-0"\n'
    if returns:
        text += '[[event]]\nat = 9.0\ndo = "return"\nreplica = "decode-0"\n'
    outcome = run(trace, Cluster(2, 2), scenario=events(text))
    assert outcome.problems == ()
    assert sum(outcome.ends.values()) == outcome.arrivals
    assert ("decode_kv" in outcome.measured.spreads) == returns
    assert outcome.measured.tpot is not None
    assert (outcome.measured.tpot.p50 > 0) == returns


def test_everything_at_once_and_the_books_still_balance(trace: TraceColumns) -> None:
    """L11 under deaths before detection, returns, slowness, silence, lies and changes of role."""
    script = events(
        "\n".join(
            f'[[event]]\nat = {at}\ndo = "{do}"\nreplica = "{replica}"\n{more}'
            for at, do, replica, more in (
                (9.0, "slow", "prefill-0", "factor = 3.0\n"),
                (9.5, "mute", "prefill-2", ""),
                (10.0, "lie", "decode-1", ""),
                (10.5, "absurd", "decode-0", ""),
                (11.0, "die", "decode-3", ""),
                (11.2, "return", "decode-3", ""),
                (12.0, "die", "prefill-3", ""),
                (12.1, "die", "prefill-3", ""),
                (18.0, "return", "prefill-3", ""),
                (19.0, "role", "prefill-1", 'to = "decode"\n'),
                (20.0, "return", "decode-1", ""),
            )
        )
    )
    outcome = run(trace, replace(SINGLE, change_s=1.0), load=0.4, scenario=script)
    assert outcome.problems == ()
    assert sum(outcome.ends.values()) == outcome.arrivals
    assert len(outcome.measured.shares["decode"]) == 5
    assert any("prefill-1 serves as decode" in line for line in outcome.log)
    assert any("prefill-3 is dead already" in line for line in outcome.log)
    assert any("decode-1 is alive" in line for line in outcome.log)


def test_a_rebalance_changes_roles_until_the_ratio_is_there(trace: TraceColumns) -> None:
    script = events('[[event]]\nat = 5.0\ndo = "rebalance"\nprefill = 2\ndecode = 6\n')
    outcome = run(trace, replace(SINGLE, change_s=1.0), load=0.3, scenario=script)
    assert outcome.problems == ()
    assert len(outcome.measured.shares["decode"]) == 6
    assert outcome.ends["finished"] == outcome.arrivals


def test_a_rebalance_of_ranks_that_are_not_there_is_told_and_not_played(trace: TraceColumns) -> None:
    script = events('[[event]]\nat = 5.0\ndo = "rebalance"\nprefill = 1\ndecode = 70\n')
    outcome = run(trace, replace(SINGLE, change_s=1.0), load=0.3, scenario=script)
    assert any("they stay as they are" in line for line in outcome.log)
    assert not any("serves as" in line for line in outcome.log)
    assert outcome.problems == ()


def test_a_slow_rank_gets_less(trace: TraceColumns) -> None:
    script = events('[[event]]\nat = 1.0\ndo = "slow"\nreplica = "prefill-0"\nfactor = 3.0\n')
    shares = run(trace, Cluster(4, 0), load=0.5, scenario=script).measured.shares["prefill"]
    assert shares[0] < 0.75 < min(shares[1:])


def test_full_decode_ranks_make_requests_wait_and_then_refuse(trace: TraceColumns) -> None:
    """L12: nothing waits without end, and what waits has its place in a queue."""
    waiting = run(trace, replace(CLUSTER, slots=12), load=0.5)
    assert waiting.problems == ()
    assert sum(waiting.ends.values()) == waiting.arrivals
    refused = run(trace, replace(CLUSTER, slots=2, patience_s=1.0), load=0.5)
    assert refused.ends["refused"] > 0
    assert refused.problems == ()
    assert not refused.passed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[event]]\nat = 1.0\n", "do = None"),
        ('[[event]]\nat = 1.0\ndo = "explode"\n', "explode"),
        ('[[event]]\nat = -1.0\ndo = "die"\nreplica = "prefill-0"\n', "at = -1.0"),
        ('[[event]]\nat = 1.0\ndo = "die"\nreplica = "router"\n', "router"),
        ('[[event]]\nat = 1.0\ndo = "die"\n', "lacks replica"),
        ('[[event]]\nat = 1.0\ndo = "die"\nreplica = "prefill-0"\nfactor = 2\n', "factor is unknown"),
        ('[[event]]\nat = 1.0\ndo = "role"\nreplica = "prefill-0"\nto = "encoder"\n', "encoder"),
        ('[[event]]\nat = 1.0\ndo = "rebalance"\nprefill = 0\ndecode = 3\n', "prefill = 0"),
        ("events = 3\n", "one list"),
        ("[[event", "no valid TOML"),
    ],
)
def test_a_scenario_that_cannot_be_played_says_why(text: str, says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        events(text)


def test_a_replica_that_is_not_there_is_refused_at_once(trace: TraceColumns) -> None:
    with pytest.raises(ScenarioError, match="prefill-0 … prefill-3"):
        run(trace, scenario=events('[[event]]\nat = 1.0\ndo = "die"\nreplica = "prefill-9"\n'))


def test_growth_is_work_left_behind_per_second() -> None:
    assert growth([0.05 * second for second in range(60)]) == pytest.approx(0.05)
    assert growth([1.0, 2.0, 1.0, 2.0] * 10) == 0.0
    assert growth([1.0]) == 0.0
