"""Deficit round robin among tenants: bounds of the theory, and a plain ring as twin."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.admission.heap import LazyHeap
from headrace.router.admission.terms import Ticket
from headrace.router.admission.tier import Record, Tier

costs = st.lists(st.integers(1, 500), min_size=1, max_size=25)


def ticket(name: str, tenant: str, tokens: int, start_by: float = 1e9) -> Ticket:
    return Ticket(name, tenant.encode(), 0, tokens, start_by)


def fill(tier: Tier, backlog: dict[str, list[int]]) -> int:
    """All requests of all tenants, tenants in turn; how many."""
    arrival = 0
    for index in range(max(len(each) for each in backlog.values())):
        for tenant, each in backlog.items():
            if index < len(each):
                arrival += 1
                tier.add(ticket(f"{tenant}{index}", tenant, each[index]), arrival)
    return arrival


class PlainRing:
    """The algorithm as published: visit after visit, quantum after quantum."""

    def __init__(self, quantum: int, backlog: dict[str, list[int]]) -> None:
        self.quantum = quantum
        self.queues = {tenant: deque(enumerate(each)) for tenant, each in backlog.items()}
        self.ring = deque(self.queues)
        self.deficit = dict.fromkeys(self.queues, 0)

    def order(self) -> list[str]:
        served = []
        while self.ring:
            tenant = self.ring.popleft()
            queue = self.queues[tenant]
            self.deficit[tenant] += self.quantum
            while queue and queue[0][1] <= self.deficit[tenant]:
                index, cost = queue.popleft()
                self.deficit[tenant] -= cost
                served.append(f"{tenant}{index}")
            if queue:
                self.ring.append(tenant)
        return served


@given(st.dictionaries(st.sampled_from("abcdef"), costs, min_size=1), st.integers(1, 300))
def test_serves_as_the_published_ring(backlog: dict[str, list[int]], quantum: int) -> None:
    """The heap of useful rounds makes the same choices as visiting everybody in every round."""
    tier = Tier(quantum)
    count = fill(tier, backlog)
    assert [tier.next().ticket.request for _ in range(count)] == PlainRing(quantum, backlog).order()


@given(st.dictionaries(st.sampled_from("abcdef"), costs, min_size=2), st.integers(1, 300))
def test_fair_within_a_quantum_and_the_largest_request(backlog: dict[str, list[int]], quantum: int) -> None:
    """L12: of tenants that wait since the beginning none gets ahead of another by a quantum + the largest request."""
    tier = Tier(quantum)
    fill(tier, backlog)
    largest = max(max(each) for each in backlog.values())
    served = dict.fromkeys(backlog, 0)
    while all(tier.account(name.encode()) is not None and tier.account(name.encode()).waiting for name in backlog):  # type: ignore[union-attr]
        record = tier.next()
        served[record.ticket.tenant.decode()] += record.ticket.cost
        if not record.account.waiting:
            break  # it does not wait any more
        assert max(served.values()) - min(served.values()) < quantum + largest


@given(costs, costs, st.integers(1, 300), st.integers(1, 500))
def test_a_newcomer_is_not_behind_a_flood(flood: list[int], other: list[int], quantum: int, cost: int) -> None:
    """L12: before a newcomer's first request runs, each flooding tenant runs at most what it could have in the rounds
    that the newcomer needs, and its deficit of at most one largest request."""
    backlog = {"a": flood * 40, "b": other * 40}
    tier = Tier(quantum)
    fill(tier, backlog)
    for _ in range(10):
        tier.next()
    tier.add(ticket("new", "c", cost), 10**6)
    largest, rounds = max(*flood, *other), -(-cost // quantum)
    before = dict.fromkeys("ab", 0)
    while (record := tier.next()).ticket.request != "new":
        before[record.ticket.tenant.decode()] += record.ticket.cost
    # Its first visit is at the end of the next round, so the current one is finished too.
    assert max(before.values()) <= (rounds + 1) * quantum + largest


@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=8)),
    st.integers(1, 300),
)
def test_corrections_keep_it_fair_in_what_was_really_computed(
    backlog: dict[str, list[tuple[int, int]]], quantum: int
) -> None:
    """L12, L27: whatever was estimated, after corrections the real tokens are shared evenly."""
    if len(backlog) < 2:
        return
    tier = Tier(quantum)
    fill(tier, {tenant: [estimate for estimate, _ in each] for tenant, each in backlog.items()})
    largest = max(max(estimate, real) for each in backlog.values() for estimate, real in each)
    real = dict.fromkeys(backlog, 0)
    while True:
        record = tier.next()
        tenant = record.ticket.tenant.decode()
        if not record.account.waiting:
            return
        cost = backlog[tenant][int(record.ticket.request[1:])][1]
        tier.correct(record, cost)
        real[tenant] += cost
        # A request is charged by estimate first: it may be one largest request over what its tenant could afford.
        assert max(real.values()) - min(real.values()) <= quantum + 2 * largest


def test_earliest_deadline_first_inside_a_tenant() -> None:
    tier = Tier(100)
    for name, start_by in (("late", 30.0), ("early", 10.0), ("middle", 20.0), ("early2", 10.0)):
        tier.add(ticket(name, "a", 10, start_by), len(tier.waiting))
    assert [tier.next().ticket.request for _ in range(4)] == ["early", "early2", "middle", "late"]


def test_back_is_first_again_and_costs_nothing() -> None:
    """L10: a request that found no room stands where it stood."""
    tier = Tier(100)
    for index in range(3):
        for tenant in "ab":
            tier.add(ticket(f"{tenant}{index}", tenant, 80), len(tier.waiting))
    first = tier.next()
    tier.back(first)
    assert tier.next() is first
    order = [tier.next().ticket.request for _ in range(5)]
    assert order == ["b0", "a1", "b1", "a2", "b2"]


def test_back_keeps_its_turn_when_its_tenant_has_nothing_else() -> None:
    tier = Tier(10)
    tier.add(ticket("a0", "a", 500), 0)
    tier.add(ticket("b0", "b", 510), 1)
    tier.add(ticket("b1", "b", 510), 2)
    first = tier.next()
    assert first.ticket.request == "a0"
    tier.back(first)
    assert [tier.next().ticket.request for _ in range(3)] == ["a0", "b0", "b1"]


def test_nothing_is_left_of_a_tenant_that_went() -> None:
    """L11: accounts last as long as something of the tenant is inside."""
    tier = Tier(10)
    records: list[Record] = []
    for index in range(100):
        tier.add(ticket(str(index), f"tenant {index}", 5), index)
    records = [tier.next() for _ in range(60)]
    assert tier.tenants == 100
    for record in (*records, *tuple(tier.waiting.values())):
        tier.leave(record)
    assert tier.empty
    assert tier.tokens == 0
    assert not tier.waiting


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 30), st.one_of(st.none(), st.integers(0, 9))), max_size=300))
def test_lazy_heap_against_a_dictionary(steps: list[tuple[int, int | None]]) -> None:
    """L11: it holds what was not taken out, and husks never outnumber that."""
    heap: LazyHeap[int] = LazyHeap()
    plain: dict[int, int] = {}
    for item, key in steps:
        if key is None:
            heap.discard(item)
            plain.pop(item, None)
        else:
            heap.push(item, key)
            plain[item] = key
        assert len(heap) == len(plain)
        assert heap.husks <= len(plain) + 17
        if plain:
            assert heap.peek()[0] == min(plain.values())
            assert plain[heap.peek()[1]] == heap.peek()[0]
    assert [heap.pop()[0] for _ in range(len(heap))] == sorted(plain.values())
