"""router.balancers.pair and link: joint choice, neighbours for a price, lazily and in order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.balancers.base import Choice, Rejected
from headrace.router.balancers.decode import DecodePolicy, Joint
from headrace.router.balancers.link import BYTES_PER_S, Links
from headrace.router.balancers.pair import JointPair, PairPolicy
from headrace.router.balancers.peers import LeastAssigned, PeerPrefill, RoundRobin, deepest_match
from headrace.router.balancers.prefill import Assessment, NewWork, PrefillPolicy
from headrace.router.cost.decode import DecodeCost
from headrace.router.cost.loading import LoadingRates
from headrace.router.cost.prefill import FixedPrefillCost
from headrace.router.fleet import Amount, Fleet
from headrace.router.index.base import no_match
from headrace.router.reports import Report
from headrace.router.topology import Role
from tests.router.balancers.fleets import BLOCK, candidate, decodes, fleet_of, match, prefills, request


def prefill_balancer(fleet: Fleet) -> NewWork:
    return NewWork(fleet, FixedPrefillCost(token_s=1e-3), LoadingRates(), PrefillPolicy(weight=0.02))


def pairs_of(fleet: Fleet, links: Links | None = None, objective_s: float | None = None, **policy: float) -> JointPair:
    decode = Joint(fleet, DecodeCost(), DecodePolicy(objective_s=objective_s))
    return JointPair(fleet, prefill_balancer(fleet), decode, PairPolicy(**policy), links)  # type: ignore[arg-type]


def two_centres(count: int = 2, token_bytes: int = 8_900) -> Fleet:
    return fleet_of(
        *prefills(count, "x", token_bytes=token_bytes),
        *(candidate(f"q{index}", Role.PREFILL, data_centre="y", token_bytes=token_bytes) for index in range(count)),
        *decodes(count, "x"),
        *decodes(count, "y"),
    )


def test_a_pair_stays_in_its_data_centre_while_nothing_is_gained() -> None:
    fleet = two_centres()
    for pair in itertools.islice(pairs_of(fleet).order(request(), no_match(8), 0.0), 2):
        assert pair.prefill.data_centre == pair.decode.data_centre
    only = list(pairs_of(fleet, neighbours=False).order(request(), no_match(8), 0.0))
    assert len(only) == 8
    assert all(pair.prefill.data_centre == pair.decode.data_centre for pair in only)
    assert len(list(pairs_of(fleet).order(request(), no_match(8), 0.0))) == 16


def test_a_neighbour_is_worth_its_link_or_not() -> None:
    """A prefix in another data centre is used while the KV crosses sooner than computing would take, by the layout that
    the workers registered."""
    first = {}
    for token_bytes in (8_900, 100_000_000):
        fleet = two_centres(token_bytes=token_bytes)
        for row in (2, 3):  # decode of y is slow
            fleet.begin(fleet.candidates(Role.DECODE)[row].id, "busy", Amount(1000, requests=200), 0.0)
        rows = {rank.id.replica_id: fleet.numbers.take(rank.id) for rank in fleet.candidates(Role.PREFILL)}
        device = [0] * 8
        device[rows["q0"]] = 16
        first[token_bytes] = next(pairs_of(fleet).order(request(20 * BLOCK), match(device), 0.0))
    near, dear = first.values()
    assert (near.prefill.id.replica_id, near.decode.data_centre) == ("q0", "x")
    assert dear.prefill.data_centre == dear.decode.data_centre


def test_a_link_that_is_used_up_turns_requests_home() -> None:
    """400 Gbit/s for eight accelerators, charged with the KV of what was chosen."""
    fleet, links = two_centres(token_bytes=1_000_000), Links()
    pairs = pairs_of(fleet, links)
    for row in (2, 3):
        fleet.begin(fleet.candidates(Role.DECODE)[row].id, "busy", Amount(1000, requests=200), 0.0)
    device = [0] * 8
    for rank in fleet.candidates(Role.PREFILL):
        device[fleet.numbers.take(rank.id)] = 16 if rank.data_centre == "y" else 0
    asked = request(20 * BLOCK)
    crossed = 0
    for _ in range(60):
        pair = next(pairs.order(asked, match(device), 0.0))
        pairs.chosen(asked, pair, 0.0)
        crossed += pair.prefill.data_centre != pair.decode.data_centre
    assert 2 <= crossed <= 58
    later = next(pairs.order(asked, match(device), 1000.0))
    assert later.prefill.data_centre != later.decode.data_centre, "drained"


def test_links_drain_at_their_rate() -> None:
    links = Links(delay_s=0.0)
    assert links.seconds(0, 1, BYTES_PER_S, 8, 0.0) == pytest.approx(1.0)
    assert links.seconds(0, 1, BYTES_PER_S, 16, 0.0) == pytest.approx(0.5)
    links.charge(0, 1, 2 * BYTES_PER_S, 8, 0.0)
    assert links.seconds(0, 1, 0, 8, 0.5) == pytest.approx(1.5)
    assert links.backlog(1, 0, 8, 0.5) == 0
    assert links.backlog(0, 1, 8, 9.0) == 0


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 30), min_size=4, max_size=4),
    st.lists(st.integers(0, 90), min_size=4, max_size=4),
    st.lists(st.integers(0, 8), min_size=8, max_size=8),
)
def test_pairs_come_in_the_order_of_their_sums(loads: list[int], running: list[int], held: list[int]) -> None:
    """Against a twin that forms every pair: prefill's cost + the answer's delay + the link."""
    fleet, links = two_centres(), Links()
    prefill, decode = fleet.candidates(Role.PREFILL), fleet.candidates(Role.DECODE)
    for rank, seconds in zip(prefill, loads, strict=True):
        fleet.begin(rank.id, "x", Amount(seconds=seconds), 0.0)
    for rank, requests in zip(decode, running, strict=True):
        fleet.begin(rank.id, "x", Amount(10, requests=requests), 0.0)
    asked, found = request(10 * BLOCK), match(held)
    pairs = pairs_of(fleet, links)
    costs = {choice.rank: choice.cost for choice in prefill_balancer(fleet).order(asked, found, 0.0)}
    pace = {rank: 0.025 + 8e-5 * (requests + 1) for rank, requests in zip(decode, running, strict=True)}

    def total(source: object, target: object, crosses: bool) -> float:
        link = links.seconds(0, 1, asked.prompt_tokens * 8900.0, 2, 0.0) if crosses else 0.0
        return costs[source] + 350 * pace[target] + link  # type: ignore[index]

    sums = [
        total(pair.prefill, pair.decode, pair.prefill.data_centre != pair.decode.data_centre)
        for pair in pairs.order(asked, found, 0.0)
    ]
    assert len(sums) == 16
    assert sums == pytest.approx(sorted(sums), abs=2e-3)


def test_rejection_comes_before_any_pair_is_asked_for() -> None:
    fleet = fleet_of(*prefills(1), *decodes(1))
    fleet.report(fleet.candidates(Role.DECODE)[0].id, Report(reserved_requests=250), 0.0)
    with pytest.raises(Rejected):
        pairs_of(fleet, objective_s=0.030).order(request(), no_match(2), 0.0)


def test_nobody_can_hold_it() -> None:
    assert list(pairs_of(fleet_of(*prefills(1))).order(request(), no_match(1), 0.0)) == []
    assert list(pairs_of(fleet_of(*decodes(1))).order(request(), no_match(1), 0.0)) == []
    small = fleet_of(*prefills(1), *decodes(1, rows=2))
    assert list(pairs_of(small).order(request(10 * BLOCK), no_match(2), 0.0)) == []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the choices that are made in the test."""
    rows: list[int] = []
    choice = Assessment.choice

    def counted(self: Assessment, row: int, prompt_tokens: int) -> Choice:
        rows.append(row)
        return choice(self, row, prompt_tokens)

    monkeypatch.setattr(Assessment, "choice", counted)
    return rows


def test_pairs_are_made_as_they_are_asked_for(made: list[int]) -> None:
    """A thousand replicas a side are a million pairs; only those that are asked for are made."""
    fleet = fleet_of(*prefills(1000), *decodes(1000))
    first = list(itertools.islice(pairs_of(fleet).order(request(), no_match(2000), 0.0), 40))
    assert len({pair.decode for pair in first}) > 1
    assert len(made) == 40


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 30), min_size=4, max_size=4),
    st.lists(st.integers(0, 90), min_size=4, max_size=4),
    st.sets(st.integers(0, 7)),
    st.booleans(),
)
def test_each_decode_rank_comes_once_with_its_best_pair(
    loads: list[int], running: list[int], failed: set[int], neighbours: bool
) -> None:
    """L16, L23: against all pairs, those with ranks that failed moved behind the others."""
    fleet = two_centres()
    ranks = [*fleet.candidates(Role.PREFILL), *fleet.candidates(Role.DECODE)]
    for rank, seconds in zip(ranks[:4], loads, strict=True):
        fleet.begin(rank.id, "x", Amount(seconds=seconds), 0.0)
    for rank, requests in zip(ranks[4:], running, strict=True):
        fleet.begin(rank.id, "x", Amount(10, requests=requests), 0.0)
    pairs, last = pairs_of(fleet, neighbours=neighbours), {ranks[at].id for at in failed}
    every = list(pairs.order(request(), no_match(8), 0.0))
    every.sort(key=lambda pair: (pair.prefill.id in last) + (pair.decode.id in last))
    expected = list({pair.decode.id: pair for pair in reversed(every)}.values())
    expected.sort(key=every.index)
    assert list(pairs.by_decode(request(), no_match(8), 0.0, last)) == expected


def test_distinct_decode_ranks_cost_one_pair_each(made: list[int]) -> None:
    """L23: a thousand idle prefill ranks do not stand between a full decode rank and the next one."""
    fleet = fleet_of(*prefills(1000), *decodes(40))
    found = list(itertools.islice(pairs_of(fleet).by_decode(request(), no_match(1040), 0.0), 32))
    assert len({pair.decode for pair in found}) == 32
    assert len(made) <= 33


def test_peers_do_what_their_names_say() -> None:
    fleet = fleet_of(*prefills(3))
    ours = prefill_balancer(fleet)
    found = match([0, 8, 4])
    turns = PeerPrefill(ours, RoundRobin())
    assert [next(turns.order(request(), found, 0.0)).rank.id.replica_id for _ in range(4)] == [
        "p000",
        "p001",
        "p002",
        "p000",
    ]
    deepest = PeerPrefill(ours, deepest_match)
    assert [c.rank.id.replica_id for c in deepest.order(request(), found, 0.0)] == ["p001", "p002", "p000"]
    fleet.begin(fleet.candidates(Role.PREFILL)[0].id, "busy", Amount(seconds=1.0), 0.0)
    assert next(PeerPrefill(ours, LeastAssigned(fleet)).order(request(), found, 0.0)).rank.id.replica_id != "p000"
