"""router.balancers.prefill: cost, its bounds, and a twin that computes it rank by rank."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.balancers.base import Choice
from headrace.router.balancers.pending import Pending, places
from headrace.router.balancers.prefill import NewWork, PrefillPolicy
from headrace.router.cost.loading import LoadingRates, Source
from headrace.router.cost.prefill import FixedPrefillCost, PrefillBatch, PrefillCost
from headrace.router.fleet import Amount, Fleet
from headrace.router.index.base import PrefixMatch, no_match
from headrace.router.reports import Report
from headrace.router.request import RoutingRequest
from headrace.router.topology import Role
from tests.router.balancers.fleets import BLOCK, decodes, fleet_of, keys, match, prefills, request

COST = FixedPrefillCost(token_s=1e-3)


def balancer(fleet: Fleet, pending: Pending | None = None, **policy: float | None) -> NewWork:
    return NewWork(fleet, COST, LoadingRates(), PrefillPolicy(**policy), pending)  # type: ignore[arg-type]


def best(balance: NewWork, asked: RoutingRequest, found: PrefixMatch, now: float = 0.0) -> Choice:
    return next(balance.order(asked, found, now))


def send(fleet: Fleet, choice: Choice, key: str, now: float = 0.0) -> None:
    fleet.begin(choice.rank.id, key, choice.prediction.amount, now)


def test_a_hit_attracts_until_the_load_says_otherwise() -> None:
    """L21: affinity is bounded by λ · (load − least load), per candidate."""
    fleet = fleet_of(*prefills(4), half_life_s=None)
    balance = balancer(fleet, weight=0.02)
    found = match([0, 8, 0, 0])
    asked = request(10 * BLOCK)
    assert best(balance, asked, found).rank.id.replica_id == "p001"
    saved = 8 * BLOCK * 1e-3
    fleet.begin(fleet.candidates(Role.PREFILL)[1].id, "much", Amount(seconds=saved / 0.02 * 0.9), 0.0)
    assert best(balance, asked, found).rank.id.replica_id == "p001"
    fleet.begin(fleet.candidates(Role.PREFILL)[1].id, "more", Amount(seconds=saved / 0.02 * 0.2), 0.0)
    assert best(balance, asked, found).rank.id.replica_id != "p001"


def test_in_an_idle_cluster_the_rank_that_has_the_prefix_gets_the_next_turn() -> None:
    """Both idle, and the other could load the prefix from the store in 6 ms: the load that the first turn left is no
    reason to go there. While the rank is busy, it is (L21); and an idle one does not draw everything for ever."""
    fleet = fleet_of(*prefills(2))
    balance = balancer(fleet)
    first = request(3 * BLOCK, text="abc")
    choice = best(balance, first, no_match(2))
    fleet.begin(choice.rank.id, "turn", choice.prediction.amount, 0.0)
    fleet.end(choice.rank.id, "turn", 0.4, choice.prediction.amount)
    holder = fleet.numbers.take(choice.rank.id)
    found = match([3 if row == holder else 0 for row in range(2)], shared=3)
    second = request(3 * BLOCK + 40, text="abc")
    again = best(balance, second, found, 0.5)
    assert again.rank == choice.rank
    assert again.prediction.cached_tokens == 3 * BLOCK
    fleet.report(choice.rank.id, Report(step=1), 0.6)
    assert best(balance, second, found, 0.6).rank == choice.rank
    fleet.begin(choice.rank.id, "other", Amount(tokens=9, requests=1, seconds=0.01), 1.0)
    fleet.report(choice.rank.id, Report(step=2), 2.0)
    elsewhere = best(balance, second, found, 2.0)
    assert elsewhere.rank != choice.rank, "busy, whatever it says"
    assert elsewhere.prediction.loaded_tokens == 3 * BLOCK
    fleet.end(choice.rank.id, "other")
    fleet.begin(choice.rank.id, "much", Amount(requests=1, seconds=20.0), 3.0)
    fleet.end(choice.rank.id, "much")
    assert best(balance, second, found, 3.0).rank != choice.rank


def test_one_hot_rank_turns_affinity_off_for_nobody_else() -> None:
    """L21: the others' matches still count when the deepest one's rank is overloaded."""
    fleet = fleet_of(*prefills(4), half_life_s=None)
    fleet.begin(fleet.candidates(Role.PREFILL)[0].id, "hot", Amount(seconds=1e4), 0.0)
    order = list(balancer(fleet).order(request(10 * BLOCK), match([9, 4, 0, 6]), 0.0))
    assert [choice.rank.id.replica_id for choice in order] == ["p003", "p001", "p002", "p000"]


def test_a_burst_of_different_prompts_spreads() -> None:
    """L22: what was sent counts before any report."""
    fleet = fleet_of(*prefills(4))
    balance = balancer(fleet)
    for index in range(40):
        send(fleet, best(balance, request(affinity=bytes([index])), no_match(4)), str(index))
    counts = [fleet.in_flight(rank.id) for rank in fleet.candidates(Role.PREFILL)]
    assert counts == [10, 10, 10, 10]


def test_a_burst_of_equal_prompts_meets_up_to_a_bound() -> None:
    """L22: before the first event tells of the blocks; with λ larger sooner elsewhere."""
    for weight, least, most in ((0.05, 15, 40), (0.5, 2, 6)):
        fleet = fleet_of(*prefills(4), half_life_s=None)
        balance = balancer(fleet, Pending(), weight=weight)
        first: dict[str, int] = {}
        for index in range(100):
            asked = request(text="abcdefghij")
            choice = best(balance, asked, no_match(4))
            balance.note(asked, choice.rank, 0.0)
            fleet.begin(choice.rank.id, str(index), Amount(seconds=10 * BLOCK * COST.token_s), 0.0)
            first.setdefault(choice.rank.id.replica_id, index)
        starts = sorted(first.values())
        assert starts[0] == 0
        assert len(starts) == 4, "none gets all"
        assert least <= starts[1] <= most


def test_equal_prompts_meet_on_an_idle_cluster_whoever_asks() -> None:
    """L22: two routers that know nothing of each other agree, and different prompts spread."""
    chosen = set()
    for text in ("hello world", "something else", "a third one", "and a fourth", "fifth", "sixth"):
        one, other = (best(balancer(fleet_of(*prefills(16))), request(text=text), no_match(16)) for _ in range(2))
        assert one.rank.id == other.rank.id
        chosen.add(one.rank.id)
    assert len(chosen) >= 3


def test_late_candidates_come_last() -> None:
    """The objective and the deadline are constraints, not costs; nothing is left out for them (L22)."""
    fleet = fleet_of(*prefills(3), half_life_s=None)
    p0, p1, _ = (rank.id for rank in fleet.candidates(Role.PREFILL))
    fleet.report(p0, Report(queued_requests=9, queued_tokens=9000), 0.0)
    fleet.report(p1, Report(queued_requests=3, queued_tokens=3000), 0.0)
    found = match([8, 4, 0])
    names = [c.rank.id.replica_id for c in balancer(fleet).order(request(), found, 0.0)]
    assert names == ["p000", "p001", "p002"]
    names = [c.rank.id.replica_id for c in balancer(fleet, objective_s=4.0).order(request(), found, 0.0)]
    assert names == ["p001", "p002", "p000"]
    names = [c.rank.id.replica_id for c in balancer(fleet, objective_s=2.0).order(request(deadline=5.0), found, 0.0)]
    assert names == ["p002", "p001", "p000"]


def test_loading_is_chosen_when_it_is_less_than_computing() -> None:
    fleet = fleet_of(*prefills(3))
    rates = LoadingRates(host_tokens_per_s=1e5, shared_tokens_per_s=5e3, host_delay_s=0.0, shared_delay_s=0.0)
    balance = NewWork(fleet, COST, rates)
    asked = request(20 * BLOCK)
    order = list(balance.order(asked, match([2, 0, 0], [6, 12, 0], 10), 0.0))
    by_name = {choice.rank.id.replica_id: choice.prediction for choice in order}
    assert order[0].rank.id.replica_id == "p001"
    assert (by_name["p001"].cached_tokens, by_name["p001"].loaded_tokens) == (0, 12 * BLOCK)
    assert (by_name["p000"].cached_tokens, by_name["p000"].loaded_tokens) == (2 * BLOCK, 8 * BLOCK)
    assert (by_name["p000"].shared_tokens, by_name["p001"].shared_tokens) == (4 * BLOCK, 0)
    assert by_name["p002"].load_s == pytest.approx(float(rates.seconds(Source.SHARED, 10 * BLOCK)))
    slow = NewWork(fleet, COST, LoadingRates(shared_tokens_per_s=100, host_tokens_per_s=100))
    assert next(slow.order(asked, match([2, 0, 0], [6, 12, 0], 10), 0.0)).prediction.loaded_tokens == 0


def test_a_slow_rank_gets_less_and_not_nothing() -> None:
    """L22, Show 6: four times slower is about a quarter of the others' work."""
    fleet = fleet_of(*prefills(4), half_life_s=None)
    cost = PrefillCost()
    for _ in range(60):
        for number in range(4):
            cost.observe(number, PrefillBatch(4, 32_768), 0.43 * (4 if number == 2 else 1), 0.0)
    balance = NewWork(fleet, cost, LoadingRates())
    for index in range(400):
        send(fleet, best(balance, request(64 * BLOCK, affinity=bytes([index % 251])), no_match(4)), str(index))
    counts = [fleet.in_flight(rank.id) for rank in fleet.candidates(Role.PREFILL)]
    others = (sum(counts) - counts[2]) / 3
    assert 0.15 * others <= counts[2] <= 0.5 * others


@pytest.mark.parametrize("report", [Report(queued_tokens=-5), Report(step_s=math.nan), Report(queued_tokens=10**15)])
def test_an_absurd_report_draws_neither_all_nor_nothing(report: Report) -> None:
    """L22, Show 6."""
    fleet = fleet_of(*prefills(4))
    balance = balancer(fleet, objective_s=4.0)
    for index in range(80):
        fleet.report(fleet.candidates(Role.PREFILL)[1].id, report, 0.0)
        send(fleet, best(balance, request(affinity=bytes([index])), no_match(4)), str(index))
    assert [fleet.in_flight(rank.id) for rank in fleet.candidates(Role.PREFILL)] == [20] * 4


def test_attention_compute_is_equalised_where_it_is_asked_for() -> None:
    """Long contexts cost attention that the curve does not see."""
    spread = {}
    for share in (0.0, 0.5):
        fleet = fleet_of(*prefills(4), half_life_s=None)
        balance = balancer(fleet, attention_share=share)
        for index in range(200):
            hit = 400 if index % 4 == 0 else 0  # in step with the number of ranks
            asked = request((hit + 8) * BLOCK, affinity=bytes([index]))
            choice = best(balance, asked, match([hit] * 4))
            send(fleet, choice, str(index))
        attention = fleet.loads(Role.PREFILL, 0.0).assigned_attention
        spread[share] = attention.max() / attention.mean()
    assert spread[0.5] < 1.2
    assert spread[0.5] < spread[0.0] - 0.15


BLOCKS = st.lists(st.integers(0, 12), min_size=5, max_size=5)


@settings(max_examples=60)
@given(BLOCKS, BLOCKS, st.integers(0, 12), st.integers(1, 14), st.lists(st.floats(0, 200), min_size=5, max_size=5))
def test_costs_are_those_of_a_plain_twin(
    device: list[int], more: list[int], shared: int, prompt: int, loads: list[float]
) -> None:
    """New work, loading and λ · load difference, rank by rank."""
    fleet = fleet_of(*prefills(5), half_life_s=None)
    for rank, seconds in zip(fleet.candidates(Role.PREFILL), loads, strict=True):
        fleet.begin(rank.id, "x", Amount(seconds=seconds), 0.0)
    rates = LoadingRates(host_tokens_per_s=3e3, shared_tokens_per_s=1.2e3, host_delay_s=0.1, shared_delay_s=0.2)
    policy = PrefillPolicy(weight=0.03)
    local = [own + extra for own, extra in zip(device, more, strict=True)]
    tokens = prompt * BLOCK
    twin = []
    for at in range(5):
        own, near = min(device[at], prompt) * BLOCK, min(local[at], prompt) * BLOCK
        far = max(near, min(shared, prompt) * BLOCK)
        host = 0.1 + (near - own) / 3e3 if near > own else 0.0
        remote = 0.2 + (far - near) / 1.2e3 if far > near else 0.0
        work = min(
            (tokens - own) * 1e-3,
            (tokens - near) * 1e-3 + host,
            (tokens - far) * 1e-3 + host + remote,
        )
        twin.append(work + 0.03 * (loads[at] - min(loads)))
    order = list(NewWork(fleet, COST, rates, policy).order(request(tokens), match(device, local, shared), 0.0))
    assert len(order) == 5
    costs = {choice.rank.id.replica_id: choice.cost for choice in order}
    assert [costs[f"p{at:03}"] for at in range(5)] == pytest.approx(twin, abs=1e-6)
    assert order[0].cost <= min(twin) * 1.001 + 1e-6
    assert [c.cost for c in order[1:]] == sorted(c.cost for c in order[1:])
    for choice in order:
        told = choice.prediction
        assert told.cached_tokens + told.loaded_tokens + told.new_tokens == tokens


def test_what_never_fits_is_left_out() -> None:
    assert list(balancer(fleet_of(*prefills(2))).order(request(2_000_000), no_match(2), 0.0)) == []
    assert list(balancer(fleet_of(*decodes(2))).order(request(), no_match(2), 0.0)) == []


def test_ranks_that_joined_after_the_match_was_asked_hold_nothing() -> None:
    fleet = fleet_of(*prefills(3))
    assert best(balancer(fleet), request(), match([0, 5])).rank.id.replica_id == "p001"


def test_pending_finds_most_of_a_shared_beginning() -> None:
    pending = Pending(keep_s=10.0)
    pending.note(keys("a" * 100 + "b" * 50), 3, 0.0)
    pending.note(keys("a" * 20), 5, 1.0)
    found = pending.depths(keys("a" * 100 + "c" * 70), 1.0)
    assert 80 <= found[3] <= 100
    assert 16 <= found[5] <= 20
    assert pending.depths(keys("a" * 100 + "b" * 50), 1.0)[3] == 150
    assert pending.depths(keys("z" * 10), 1.0) == {}
    assert set(pending.depths(keys("a" * 10), 10.5)) == {5}
    assert pending.depths(keys("a" * 10), 12.0) == {}
    assert len(pending) == 0


def test_pending_forgets_a_rank_that_is_gone() -> None:
    """L14: the next rank with the number was sent nothing; what others were sent stays, and so does what is sent on."""
    pending = Pending(keep_s=10.0)
    pending.note(keys("abc"), 3, 0.0)
    pending.note(keys("abc"), 5, 0.0)
    pending.note(keys("xyz"), 3, 0.0)
    pending.clear(3)
    assert pending.depths(keys("abc"), 1.0) == {5: 3}
    assert pending.depths(keys("xyz"), 1.0) == {}
    pending.note(keys("abc"), 3, 5.0)
    assert pending.depths(keys("abc"), 12.0) == {3: 3}, "the older note's end is not the newer one's"
    assert pending.depths(keys("abc"), 16.0) == {}
    assert len(pending) == 0


def test_pending_is_bounded() -> None:
    """L24 for what the router remembers of a burst."""
    pending = Pending(keep_s=1e9, most=200)
    for index in range(300):
        pending.note(keys(f"{index:03}" * 7), index, 0.0)
    pending.depths((), 0.0)
    assert len(pending) <= 200


@given(st.integers(0, 3000))
def test_places_are_few_and_dense_enough(blocks: int) -> None:
    found = places(blocks)
    assert list(found) == sorted(set(found), reverse=True)
    assert len(found) <= 40
    for length in range(1, blocks + 1, max(1, blocks // 50)):
        assert max(place for place in found if place <= length) >= 0.75 * length
