"""router.admission: bounds, tiers, waiting for room, refusals; with a simulated clock."""

from __future__ import annotations

import heapq
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.admission import Admission, AdmissionLimits, Cause, NoPlace, Refused, Ticket, TooLate


def ticket(name: str, *, tenant: str = "t", priority: int = 0, tokens: int = 10, start_by: float = 1e9) -> Ticket:
    return Ticket(name, tenant.encode(), priority, tokens, start_by)


def refusal(admission: Admission, one: Ticket, now: float = 0.0) -> NoPlace:
    with pytest.raises(NoPlace) as refused:
        admission.enter(one, now)
    return refused.value


def test_runs_waits_refuses() -> None:
    """L12: bounded, and overload says when to come back."""
    admission = Admission(AdmissionLimits(max_running=1, max_waiting=2))
    assert admission.enter(ticket("a"), 0.0).started == ("a",)
    assert admission.enter(ticket("b"), 0.0).started == ()
    assert admission.enter(ticket("c", priority=5), 0.0).started == ()
    full = refusal(admission, ticket("d"))
    assert full.cause is Cause.REQUESTS
    assert full.retry_after_s > 0
    assert admission.leave("a", 1.0).started == ("c",)
    assert admission.leave("c", 2.0).started == ("b",)
    assert admission.leave("b", 3.0).started == ()
    assert (admission.running, admission.waiting, admission.tenants()) == (0, 0, 0)


def test_a_higher_priority_takes_the_place_of_the_newest_lowest() -> None:
    """L12: a queue full of batch work is not full for what goes before it; who has to go is told so."""
    admission = Admission(AdmissionLimits(max_running=1, max_waiting=2))
    for one in (ticket("runs"), ticket("old", priority=-1), ticket("new", priority=-1)):
        admission.enter(one, 0.0)
    (displaced,) = admission.enter(ticket("urgent"), 1.0).ended
    assert displaced[0] == "new"
    assert isinstance(displaced[1], NoPlace)
    assert displaced[1].cause is Cause.DISPLACED
    assert refusal(admission, ticket("batch", priority=-1)).cause is Cause.REQUESTS
    assert admission.leave("runs", 2.0).started == ("urgent",)


def test_tokens_that_wait_are_bounded_and_a_larger_one_waits_alone() -> None:
    admission = Admission(AdmissionLimits(max_running=1, max_waiting=9, max_waiting_tokens=100))
    admission.enter(ticket("runs"), 0.0)
    admission.enter(ticket("huge", tokens=500), 0.0)
    assert refusal(admission, ticket("more", tokens=1)).cause is Cause.TOKENS
    admission.leave("huge", 1.0)
    admission.enter(ticket("x", tokens=60), 1.0)
    admission.enter(ticket("y", tokens=40), 1.0)
    assert refusal(admission, ticket("z", tokens=1)).cause is Cause.TOKENS
    assert admission.waiting_tokens == 100


def test_nobody_is_displaced_in_vain() -> None:
    """L12: what would not fit even then changes nothing."""
    admission = Admission(AdmissionLimits(max_running=1, max_waiting=9, max_waiting_tokens=100))
    admission.enter(ticket("runs"), 0.0)
    admission.enter(ticket("low", priority=-1, tokens=50), 0.0)
    admission.enter(ticket("same", tokens=50), 0.0)
    assert refusal(admission, ticket("big", tokens=60)).cause is Cause.TOKENS
    assert admission.waiting == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=60), st.sampled_from([0.25, 0.5, 0.8]))
def test_one_tenant_cannot_fill_the_queue(arrivals: list[tuple[str, int]], share: float) -> None:
    """L12: however the others flood, a tenant that has nothing here finds a place."""
    admission = Admission(AdmissionLimits(max_running=1, max_waiting=16, tenant_share=share))
    admission.enter(ticket("runs"), 0.0)
    for index, (tenant, tokens) in enumerate(arrivals):
        with suppress(NoPlace):
            admission.enter(ticket(str(index), tenant=tenant, tokens=tokens), 0.0)
    assert admission.enter(ticket("new", tenant="newcomer"), 0.0).ended == ()


def test_beyond_its_share_a_tenants_own_lower_tier_makes_place() -> None:
    """L12: its batch work is no reason to refuse its urgent request; nobody else's goes for it."""
    admission = Admission(AdmissionLimits(max_running=1, max_waiting=8, tenant_share=0.5))
    for one in (ticket("runs"), ticket("other", tenant="u", priority=-1)):
        admission.enter(one, 0.0)
    for number in range(3):
        admission.enter(ticket(f"batch{number}", priority=-1), 0.0)
    assert refusal(admission, ticket("batch3", priority=-1)).cause is Cause.TENANT
    (displaced,) = admission.enter(ticket("urgent"), 1.0).ended
    assert (displaced[0], displaced[1].cause) == ("batch2", Cause.DISPLACED)
    for name in ("more", "still more"):
        admission.enter(ticket(name), 1.0)
    assert refusal(admission, ticket("too many")).cause is Cause.TENANT
    assert admission.waiting_by_priority() == {-1: 1, 0: 3}


def test_late_requests_end_with_an_error_of_their_own() -> None:
    """L6: what cannot be done in time any more does not rot in the queue, nor enter it."""
    admission = Admission(AdmissionLimits(max_running=1, max_waiting=9))
    admission.enter(ticket("runs"), 0.0)
    admission.enter(ticket("soon", start_by=5.0), 0.0)
    admission.enter(ticket("later", start_by=9.0), 0.0)
    assert admission.next_expiry() == 5.0
    assert admission.expire(4.9).ended == ()
    (late,) = admission.expire(5.0).ended
    assert late[0] == "soon"
    assert isinstance(late[1], TooLate)
    assert admission.next_expiry() == 9.0
    with pytest.raises(TooLate):
        admission.enter(ticket("hopeless", start_by=6.0), 6.0)
    assert admission.leave("runs", 7.0).started == ("later",)
    assert admission.next_expiry() is None


# --- room at decode --------------------------------------------------------------------------------------------------


def test_without_a_queue_no_room_is_a_refusal() -> None:
    """L12, L10: nothing of it is left inside."""
    admission = Admission(AdmissionLimits(max_running=9, max_waiting=0))
    admission.enter(ticket("a"), 0.0)
    with pytest.raises(NoPlace) as refused:
        admission.no_room("a", 0.0)
    assert refused.value.cause is Cause.ROOM
    assert admission.leave("a", 0.0).started == ()
    assert (admission.running, admission.waiting, admission.blocked) == (0, 0, False)


def test_nobody_overtakes_the_first_while_it_waits_for_room() -> None:
    """L12: a large request does not starve behind small ones; after news one is tried, then two, then four."""
    admission = Admission(AdmissionLimits(max_running=99, max_waiting=99))
    admission.enter(ticket("large", tokens=10**6), 0.0)
    admission.no_room("large", 0.0)
    for index in range(9):
        assert admission.enter(ticket(str(index), tenant=str(index)), 0.0).started == ()
    assert admission.blocked
    assert admission.room(1.0).started == ("large",)
    admission.no_room("large", 1.1)
    assert admission.room(2.0).started == ("large",)
    assert admission.placed("large", 2.1).started == ("0", "1")
    assert admission.placed("0", 2.2).started == ("2", "3")
    assert admission.placed("1", 2.2).started == ("4", "5")
    admission.no_room("4", 2.3)
    assert admission.placed("5", 2.4).started == ()
    assert admission.room(3.0).started == ()  # two are still out
    assert admission.placed("2", 3.1).started == ("4", "6")


def test_it_waits_for_room_only_so_long() -> None:
    """L6, L12: all tries together, not each."""
    admission = Admission(AdmissionLimits(max_running=9, max_waiting=9, room_wait_s=10.0))
    admission.enter(ticket("a"), 0.0)
    admission.no_room("a", 1.0)
    assert admission.room(5.0).started == ("a",)
    admission.no_room("a", 6.0)
    assert admission.next_expiry() == 11.0
    admission.enter(ticket("b"), 7.0)
    gone = admission.expire(11.0)
    assert [(name, error.cause) for name, error in gone.ended] == [("a", Cause.ROOM)]
    assert gone.started == ("b",)  # it may need less room


def test_a_returning_request_displaces_what_is_behind_it() -> None:
    admission = Admission(AdmissionLimits(max_running=1, max_waiting=2))
    admission.enter(ticket("first"), 0.0)
    admission.enter(ticket("second"), 0.0)
    admission.enter(ticket("third"), 0.0)
    changes = admission.no_room("first", 1.0)
    assert [name for name, _ in changes.ended] == ["third"]
    assert admission.room(2.0).started == ("first",)


def test_a_higher_priority_is_tried_although_another_waits_for_room() -> None:
    admission = Admission(AdmissionLimits(max_running=9, max_waiting=9))
    admission.enter(ticket("large"), 0.0)
    admission.no_room("large", 0.0)
    assert admission.enter(ticket("urgent", priority=1), 0.1).started == ("urgent",)
    admission.no_room("urgent", 0.2)
    assert admission.enter(ticket("also urgent", priority=1), 0.3).started == ()


# --- when to come back -----------------------------------------------------------------------------------------------


def drained(rate: int) -> Admission:
    """Requests of `rate` tokens have ended, one a second, until 20.0."""
    admission = Admission(AdmissionLimits(max_running=1, max_waiting=1))
    for second in range(21):
        admission.enter(ticket(str(second), tokens=rate), float(second))
        admission.placed(str(second), float(second))
        admission.leave(str(second), float(second))
    admission.enter(ticket("runs"), 20.0)
    admission.enter(ticket("waits"), 20.0)
    return admission


def test_retry_after_follows_the_rate_and_the_place_in_line() -> None:
    """L12: a thousand tokens a second are drained; each that is refused adds its own to the line."""
    admission = drained(1000)
    delays = [refusal(admission, ticket(f"x{n}", tokens=2000), 20.0).retry_after_s for n in range(4)]
    assert delays == pytest.approx([2.0, 4.0, 6.0, 8.0])
    # As time passes the line gets shorter; without completions the rate sinks, to 800 a second here.
    assert refusal(admission, ticket("y", tokens=2000), 25.0).retry_after_s == pytest.approx(3.0 + 2.5)
    many = [refusal(admission, ticket(f"z{n}", tokens=50_000), 25.0).retry_after_s for n in range(20)]
    assert max(many) <= 60.0
    assert len({round(delay, 3) for delay in many}) == 20


def test_retry_after_does_not_grow_by_itself() -> None:
    """L12: a cluster that was full for a moment and idle since drains little, since little comes. That is no reason to
    call those that were refused late."""
    admission = Admission(AdmissionLimits(max_running=10, max_waiting=0))
    now, told = 0.0, []
    for number in range(60):
        slots = [f"{number}/{slot}" for slot in range(10)]
        for name in slots:
            admission.enter(ticket(name, tokens=100), now)
            admission.placed(name, now)
        if number:
            told.append(refusal(admission, ticket("x", tokens=100), now + 0.1).retry_after_s)
        for name in slots:
            admission.leave(name, now + 0.2)
        now += 10.0
    assert max(told) <= 0.2, "ten requests that stay for 0.2 s are 5,000 tokens a second"


def test_without_a_rate_the_default_is_spread() -> None:
    admission = Admission(AdmissionLimits(max_running=1, max_waiting=0, default_retry_after_s=1.0))
    admission.enter(ticket("runs"), 0.0)
    delays = [refusal(admission, ticket(str(n))).retry_after_s for n in range(10)]
    assert all(1.0 <= delay <= 2.0 for delay in delays)
    assert len(set(delays)) == 10


# --- against twins, and under floods ---------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "no room", "room", "placed", "expire"]), st.integers(0, 9)),
        max_size=120,
    ),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([0.3, 1.0]),
)
def test_every_request_is_in_exactly_one_place(
    steps: list[tuple[str, int]], max_running: int, max_waiting: int, share: float
) -> None:
    """L11, L12: bounds hold at every instant, whoever is told an end is out, and at the end nothing is left."""
    admission = Admission(
        AdmissionLimits(max_running, max_waiting, max_waiting_tokens=120, tenant_share=share, room_wait_s=20.0)
    )
    running: set[str] = set()
    waiting: dict[str, Ticket] = {}

    def apply(started: tuple[str, ...], ended: tuple[tuple[str, Refused], ...]) -> None:
        for name, _ in ended:
            del waiting[name]
        for name in started:
            del waiting[name]
            running.add(name)

    for now, (step, number) in enumerate(steps):
        name = str(number)
        inside = name in running or name in waiting
        one = ticket(name, tenant=str(number % 3), priority=number % 2, tokens=number * 7, start_by=now + 40.0)
        if step == "enter" and not inside:
            try:
                changes = admission.enter(one, float(now))
            except Refused:
                continue
            waiting[name] = one
        elif step == "no room" and name in running:
            running.discard(name)
            try:
                changes = admission.no_room(name, float(now))
            except Refused:
                changes = admission.leave(name, float(now))
            else:
                waiting[name] = one
        elif step == "leave":
            running.discard(name)
            waiting.pop(name, None)
            changes = admission.leave(name, float(now))
        elif step == "placed":
            changes = admission.placed(name, float(now))
        elif step == "expire":
            changes = admission.expire(float(now))
        else:
            changes = admission.room(float(now))
        apply(changes.started, changes.ended)
        assert (admission.running, admission.waiting) == (len(running), len(waiting))
        assert len(running) <= max_running
        assert len(waiting) <= max_waiting
        assert sum(admission.waiting_by_priority().values()) == len(waiting)
        if not waiting:
            assert not admission.blocked
    for name in (*running, *waiting):
        admission.leave(name, 1e6)
    assert (admission.running, admission.waiting, admission.tenants(), admission.waiting_tokens) == (0, 0, 0, 0)


@dataclass
class SimulatedCluster:
    """Drains `rate` tokens per second over `slots` requests at a time, for a queue under test."""

    admission: Admission
    rate: float
    now: float = 0.0
    ends: list[tuple[float, str]] = field(default_factory=list)
    costs: dict[str, int] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)

    def start(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.begun[name] = self.now
            heapq.heappush(self.ends, (self.now + self.costs[name] / self.rate, name))

    def arrive(self, one: Ticket) -> None:
        self.costs[one.request] = one.tokens
        self.start(self.admission.enter(one, self.now).started)

    def until(self, moment: float) -> None:
        while self.ends and self.ends[0][0] <= moment:
            self.now, name = heapq.heappop(self.ends)
            self.admission.placed(name, self.now)
            self.start(self.admission.leave(name, self.now).started)
        self.now = moment


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(256, 4096))
def test_a_flood_of_one_tenant_delays_another_by_its_share_only(flood: int, small: int, quantum: int) -> None:
    """L12: a tenant below its share of the rate waits for at most the request that runs, one round's quantum and one
    largest request of the flood, per quantum of its own."""
    limits = AdmissionLimits(max_running=1, max_waiting=10_000, quantum_tokens=quantum)
    cluster = SimulatedCluster(Admission(limits), rate=1000.0)
    for index in range(300):
        cluster.arrive(ticket(f"flood{index}", tenant="flood", tokens=flood))
    bound = (flood + (-(-small // quantum) + 1) * quantum + flood) / cluster.rate
    for index in range(5):
        arrives = cluster.now + 3 * (small + bound * cluster.rate) / cluster.rate
        if arrives > 300 * flood / cluster.rate:
            return  # the flood is over
        cluster.until(arrives)
        name = f"small{index}"
        cluster.arrive(ticket(name, tenant="small", tokens=small))
        cluster.until(arrives + bound + 1e-6)
        assert name in cluster.begun


def test_a_large_request_does_not_starve() -> None:
    """L12: 200,000 tokens against a quantum of 2,048, beside tenants whose small requests never end."""
    limits = AdmissionLimits(max_running=1, max_waiting=10_000)
    cluster = SimulatedCluster(Admission(limits), rate=1000.0)
    for tenant in range(3):
        for index in range(2500):
            cluster.arrive(ticket(f"{tenant}/{index}", tenant=str(tenant), tokens=500))
    cluster.arrive(ticket("large", tenant="large", tokens=200_000))
    rounds = -(-200_000 // 2048) + 1
    cluster.until((rounds * 3 * 2048 + 3 * 500 + 500) / 1000.0)
    assert "large" in cluster.begun


def test_ten_thousand_waiting_cost_little() -> None:
    """Operations stay logarithmic: ten times as many waiting must not cost ten times as much each.

    Counted, not timed: comparisons of keys inside the heaps."""

    class Counted(float):
        comparisons = 0

        def __lt__(self, other: float) -> bool:
            Counted.comparisons += 1
            return float(self) < float(other)

    def work(waiting: int) -> float:
        admission = Admission(AdmissionLimits(max_running=1, max_waiting=waiting + 1))
        admission.enter(ticket("runs"), 0.0)
        for index in range(waiting):
            one = ticket(str(index), tenant=str(index % 50), start_by=Counted(1e6 + index * 7919 % 1000))
            admission.enter(one, 0.0)
        Counted.comparisons = 0
        previous = "runs"
        for _ in range(200):
            (previous,) = admission.leave(previous, 1.0).started
        return Counted.comparisons / 200

    assert work(10_000) < 4 * work(500)


def test_the_example_of_the_readme() -> None:
    queue = Admission(AdmissionLimits(max_running=1, max_waiting=100))
    assert queue.enter(Ticket("a", b"acme", 0, 5000, 60.0), 0.0).started == ("a",)
    assert queue.enter(Ticket("b", b"acme", 0, 5000, 60.0), 0.1).started == ()
    assert queue.enter(Ticket("c", b"beta", 0, 100, 60.0), 0.2).started == ()
    assert queue.leave("a", 1.0).started == ("c",)
