"""router.fleet: membership, and columns of loads against a plain twin."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.fleet import Amount, Fleet
from headrace.router.ranks import RankNumbers
from headrace.router.reports import Report
from headrace.router.topology import Candidate, RankId, Role


def candidate(replica: str, incarnation: str = "1", role: Role = Role.DECODE, **changes: object) -> Candidate:
    fields: dict[str, object] = {
        "data_centre": "dc",
        "host": "h",
        "rows": 100,
        "slots": 4,
        "block_tokens": 128,
        "context_tokens": 4096,
    }
    return Candidate(RankId(replica, incarnation), role, **{**fields, **changes})  # type: ignore[arg-type]


def fleet_of(*ranks: Candidate, **settings: float | None) -> Fleet:
    fleet = Fleet(RankNumbers(), **settings)  # type: ignore[arg-type]
    for rank in ranks:
        fleet.put(rank.id.replica_id, rank.id.incarnation, [rank])
    return fleet


def tokens(fleet: Fleet, now: float, role: Role = Role.DECODE) -> list[int]:
    loads: list[int] = fleet.loads(role, now).tokens.tolist()
    return loads


A = RankId("a", "1")


def test_a_restarted_replica_is_another_member() -> None:
    """L14: membership by incarnation; the late removal of the old life leaves the new one."""
    fleet = fleet_of()
    assert fleet.put("d0", "a", [candidate("d0", "a")]) is None
    assert fleet.put("d0", "b", [candidate("d0", "b")]) == "a"
    assert RankId("d0", "a") not in fleet
    assert not fleet.remove("d0", "a")
    assert [rank.id.incarnation for rank in fleet.candidates(Role.DECODE)] == ["b"]
    assert fleet.forget(RankId("d0", "a")) == 0
    assert fleet.remove("d0", "b")
    assert fleet.candidates(Role.DECODE) == ()
    assert fleet.forget(RankId("d0", "b")) == 1
    assert fleet.forget(RankId("d0", "b")) is None


def test_a_number_that_is_used_again_begins_empty() -> None:
    fleet = fleet_of(candidate("a"), candidate("b"))
    fleet.begin(A, "r", Amount(50, requests=1, seconds=3.0), 0.0)
    fleet.report(A, Report(kv_tokens=700), 0.0)
    assert fleet.forget(A) == 0
    assert fleet.idle
    fleet.put("c", "1", [candidate("c")])
    assert fleet.columns(Role.DECODE).numbers.tolist() == [1, 0]
    assert tokens(fleet, 0.0) == [0, 0]
    assert not fleet.report(A, Report(), 1.0)
    fleet.begin(A, "late", Amount(50), 1.0)
    fleet.end(A, "late")
    assert fleet.idle


def test_a_draining_replica_gets_nothing_new_and_keeps_its_account() -> None:
    fleet = fleet_of(candidate("a"))
    fleet.begin(A, "r", Amount(50, requests=1), 0.0)
    fleet.remove("a", "1")
    assert fleet.candidates(Role.DECODE) == ()
    assert fleet.in_flight(A) == 1
    fleet.end(A, "r")
    assert fleet.idle


@pytest.mark.parametrize(
    ("prompt", "choices"), [(10, 4), (127, 1), (128, 1), (12_671, 1), (12_672, 2), (10, 5), (4095, 1), (4096, 1)]
)
def test_what_can_never_fit_is_known(prompt: int, choices: int) -> None:
    small = candidate("d0", rows=99, context_tokens=20_000)
    limited = candidate("d1")
    columns = fleet_of(small, limited).columns(Role.DECODE)
    rows = -(-(prompt + 1) // 128) + choices - 1
    expected = [rank.fits(prompt, rows, choices) for rank in (small, limited)]
    assert columns.fits(prompt, choices).tolist() == expected


def test_burst_between_two_reports_spreads() -> None:
    """L22: load = last report + own in-flight."""
    fleet = fleet_of(candidate("a"), settle_s=0.1)
    fleet.report(A, Report(kv_tokens=100, running_requests=1, step=1), now=0.0)
    fleet.begin(A, "r1", Amount(50, requests=1), now=1.0)
    fleet.begin(A, "r2", Amount(50, requests=1), now=1.0)
    assert tokens(fleet, 2.0) == [200]
    fleet.report(A, Report(kv_tokens=100, running_requests=1, step=2), now=1.05)
    assert tokens(fleet, 2.0) == [200], "written before they arrived"
    fleet.report(A, Report(kv_tokens=200, running_requests=3, step=3), now=3.0)
    assert tokens(fleet, 3.0) == [200]
    assert not fleet.report(A, Report(kv_tokens=7, step=1), now=4.0)
    assert tokens(fleet, 4.0) == [200]


def test_work_that_a_report_is_known_to_count_is_not_counted_twice() -> None:
    fleet = fleet_of(candidate("a"), settle_s=1.0)
    fleet.begin(A, "r1", Amount(50, requests=1), now=1.0)
    fleet.begin(A, "r2", Amount(70, requests=1), now=1.0)
    fleet.report(A, Report(kv_tokens=50, reserved_requests=1), now=1.0, counts="r1")
    assert tokens(fleet, 1.0) == [120]
    fleet.end(A, "r1")
    fleet.end(A, "r2")
    assert tokens(fleet, 1.0) == [0], "the report counts r1, which has ended since"


def test_what_a_report_counts_and_has_ended_since_counts_no_more() -> None:
    """L22: else a rank that reported early looks fuller than one that reported late."""
    fleet = fleet_of(candidate("a"))
    fleet.begin(A, "r", Amount(50, requests=1), now=0.0)
    fleet.report(A, Report(kv_tokens=80, running_requests=2), now=1.0)
    fleet.end(A, "r")
    assert tokens(fleet, 1.5) == [30]
    assert fleet.loads(Role.DECODE, 1.5).requests.tolist() == [1]
    fleet.report(A, Report(kv_tokens=20, running_requests=1, step=1), now=2.0)
    assert tokens(fleet, 2.0) == [20]


def test_stale_reports_degrade_to_own_knowledge() -> None:
    """L22: an old report never stops dispatch."""
    fleet = fleet_of(candidate("a"), stale_after_s=5.0)
    fleet.begin(A, "r", Amount(50, requests=1), now=0.0)
    fleet.report(A, Report(kv_tokens=900, running_requests=3), now=1.0)
    assert tokens(fleet, 6.0) == [900]
    assert tokens(fleet, 6.1) == [50]


def test_a_report_that_is_told_over_and_over_grows_old() -> None:
    """L22, Show 6: who has work and does not step tells nothing new; who is idle does."""
    fleet = fleet_of(candidate("a"), stale_after_s=5.0)
    fleet.begin(A, "r", Amount(50, requests=1), now=0.0)
    for now in (1.0, 4.0, 6.1):
        assert fleet.report(A, Report(kv_tokens=900, running_requests=3, step=7), now)
        assert tokens(fleet, now) == [900 if now < 6 else 50]
    fleet.report(A, Report(kv_tokens=950, running_requests=3, step=8), 7.0)
    assert tokens(fleet, 7.0) == [950]
    fleet.end(A, "r")
    for now in (8.0, 20.0):
        fleet.report(A, Report(kv_tokens=40, step=9), now)
        assert tokens(fleet, now) == [40]


@pytest.mark.parametrize(
    "report",
    [
        Report(kv_tokens=-1),
        Report(queued_requests=-5),
        Report(kv_tokens=12_801),
        Report(slots_used=5),
        Report(step_s=-1.0),
        Report(step_s=math.inf),
        Report(step_s=math.nan),
        Report(queued_tokens=10**12),
        Report(running_requests=4_000_000_000),
        Report(running_requests=5),
        Report(reserved_requests=5),
        Report(queued_requests=4_000_000_000),
        Report(queued_requests=13),
        Report(step=2**63),
        Report(step=2**41),
        Report(step=2**39),
    ],
)
def test_absurd_reports_are_not_believed(report: Report) -> None:
    """L22: they degrade to own knowledge, and the next sane one is believed again."""
    fleet = fleet_of(candidate("a", queue_requests=8), candidate("b"))
    fleet.report(A, Report(kv_tokens=900, step=4), now=0.0)
    fleet.begin(A, "r", Amount(50, requests=1), now=1.0)
    assert not fleet.report(A, report, now=2.0)
    assert fleet.absurd == {A: 1}
    assert tokens(fleet, 2.0) == [50, 0]
    assert fleet.report(A, Report(kv_tokens=300, step=5), now=3.0)
    assert tokens(fleet, 3.0) == [300, 0]


@pytest.mark.parametrize("role", list(Role))
def test_counts_are_bounded_where_a_rank_tells_no_capacity(role: Role) -> None:
    """L22: also where slots, queue and image tokens have no number of their own."""
    unlimited = candidate("a", role=role, slots=0)
    for told in (Report(running_requests=2**21), Report(queued_requests=2**21), Report(queued_tokens=2**63)):
        fleet = fleet_of(unlimited)
        assert not fleet.report(A, told, now=0.0)
        assert fleet.absurd == {A: 1}


def test_a_step_that_was_untrue_makes_honest_reports_older_for_a_while_only() -> None:
    """L22: a first report may say any step; own knowledge decides until it is stale, then the next one is believed."""
    fleet = fleet_of(candidate("a"), stale_after_s=5.0)
    assert fleet.report(A, Report(kv_tokens=900, step=2**39), now=0.0)
    assert not fleet.report(A, Report(kv_tokens=100, step=7), now=5.0)
    assert fleet.report(A, Report(kv_tokens=100, step=8), now=5.1)
    assert tokens(fleet, 5.1) == [100]
    assert fleet.report(A, Report(kv_tokens=200, step=8 + 3_600_000), now=3605.0), "an hour without a report"


def test_a_decode_rank_that_forgets_requests_is_not_believed_idle() -> None:
    """L22: what this router knows to be in flight is there, whatever the report says."""
    fleet = fleet_of(candidate("a"))
    for name in "xyz":
        fleet.begin(A, name, Amount(10, requests=1), now=0.0)
    fleet.report(A, Report(), now=1.0)
    assert fleet.loads(Role.DECODE, 1.0).requests.tolist() == [3]


def test_assigned_work_decays_and_is_corrected() -> None:
    fleet = fleet_of(candidate("a"), candidate("b"), half_life_s=10.0)
    fleet.begin(A, "r", Amount(seconds=8.0), now=0.0)
    assert fleet.loads(Role.DECODE, 10.0).assigned.tolist() == pytest.approx([4.0, 0.0])
    fleet.end(A, "r", now=10.0, worked=Amount(seconds=4.0))
    assert fleet.loads(Role.DECODE, 10.0).assigned.tolist() == pytest.approx([2.0, 0.0])
    fleet.begin(RankId("b", "1"), "s", Amount(seconds=6.0), now=10.0)
    fleet.put("c", "1", [candidate("c")])
    assert fleet.loads(Role.DECODE, 10.0).assigned.tolist() == pytest.approx([2.0, 6.0, 2.0]), (
        "a newcomer draws not all"
    )
    still = fleet_of(candidate("a"), half_life_s=None)
    still.begin(A, "r", Amount(seconds=8.0), now=0.0)
    assert still.loads(Role.DECODE, 1e9).assigned.tolist() == [8.0]


AMOUNTS = st.builds(
    Amount,
    tokens=st.integers(0, 10**6),
    hit_tokens=st.integers(0, 10**6),
    requests=st.integers(0, 8),
    seconds=st.floats(0, 1e3),
    attention=st.floats(0, 1e12),
)
STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("uvwxyz"), st.sampled_from(["begin", "end", "report"]), AMOUNTS),
    max_size=60,
)


def counted(
    live: dict[str, dict[str, tuple[Amount, float]]], covered: set[tuple[str, str, float]], name: str, key: str
) -> int:
    """Tokens of live work that the last report counts."""
    amount, since = live[name].get(key, (Amount(), -1.0))
    return amount.tokens if (name, key, since) in covered else 0


@given(STEPS, st.sampled_from([0.0, 2.0]))
def test_columns_are_the_sums_over_live_sets(steps: list[tuple[str, str, str, Amount]], settle_s: float) -> None:
    """L11: whatever the order of begins, ends and reports, columns equal a plain twin; at the end they are zero."""
    ranks = [candidate(name, role=Role.PREFILL) for name in "abc"]
    fleet = fleet_of(*ranks, stale_after_s=1e9, settle_s=settle_s)
    live: dict[str, dict[str, tuple[Amount, float]]] = {name: {} for name in "abc"}
    reported: dict[str, tuple[int, float]] = {}
    covered: set[tuple[str, str, float]] = set()
    ended = dict.fromkeys("abc", 0)
    for clock, (name, key, what, amount) in enumerate(steps):
        now, rank = float(clock), RankId(name, "1")
        if what == "begin":
            ended[name] += counted(live, covered, name, key)
            fleet.begin(rank, key, amount, now)
            live[name][key] = (amount, now)
        elif what == "end":
            ended[name] += counted(live, covered, name, key)
            fleet.end(rank, key)
            live[name].pop(key, None)
        else:
            fleet.report(rank, Report(queued_requests=300, queued_tokens=amount.tokens), now)
            reported[name] = (amount.tokens, now)
            ended[name] = 0
            covered |= {(name, other, since) for other, (_, since) in live[name].items() if since < now - settle_s}
        for at, other in enumerate("abc"):
            of = live[other].values()
            unknown = [one for key_, (one, since) in live[other].items() if (other, key_, since) not in covered]
            said = max(0, reported.get(other, (0, 0.0))[0] - ended[other])
            assert tokens(fleet, now, Role.PREFILL)[at] == said + sum(one.tokens for one in unknown)
            own = fleet.own(RankId(other, "1"))
            assert own.tokens == sum(one.tokens for one, _ in of)
            assert own.hit_tokens == sum(one.hit_tokens for one, _ in of)
            assert own.requests == sum(one.requests for one, _ in of)
            assert own.seconds == pytest.approx(sum(one.seconds for one, _ in of), abs=1e-6)
            assert own.attention == sum(round(one.attention) for one, _ in of)
            assert fleet.in_flight(RankId(other, "1")) == len(of)
    for name, entries in live.items():
        for key in entries:
            fleet.end(RankId(name, "1"), key)
    assert fleet.idle
    assert [fleet.own(RankId(name, "1")) for name in "abc"] == [Amount()] * 3
