"""Balancers in the service: what is learnt from reports, and how an attempt goes down its list."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.router.balancers.base import Pair, Prediction
from headrace.router.cost.loading import Source
from headrace.router.fleet import Amount, Fleet
from headrace.router.index.base import PrefixMatch, no_match
from headrace.router.topology import RankId, Role
from headrace.services.router import reserve as reserve_module
from headrace.services.router.balance import Balance
from headrace.services.router.reserve import Reserver
from headrace.services.router.settings import BalanceSection
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.errors import HeadraceError, InvalidArgument, NeverFits, ResourceExhausted, Unavailable
from headrace.v1 import common_pb2, prefill_pb2
from tests.router.balancers.fleets import decodes, fleet_of, prefills, request


def report(step: int, seconds: float, tokens: int, requests: int = 1, context: int = 0) -> common_pb2.LoadReport:
    return common_pb2.LoadReport(
        step=step,
        step_us=round(seconds * 1e6),
        step_requests=requests,
        step_tokens=tokens,
        step_context_tokens=context,
        step_pairs=tokens * context + tokens * tokens // 2,
    )


def test_costs_follow_what_steps_took() -> None:
    """2 ms a prompt token, and decode steps of 80 ms: what a small model on a CPU takes."""
    fleet = fleet_of(*prefills(1), *decodes(1))
    balance = Balance(fleet, BalanceSection())
    prefill, decode = fleet.candidates(Role.PREFILL)[0].id, fleet.candidates(Role.DECODE)[0].id
    for step in range(1, 60):
        tokens = 100 + 37 * step % 400
        balance.learn(prefill, report(step, 0.002 * tokens, tokens), float(step))
        balance.learn(decode, report(step, 0.080, 4, 4, 4000), float(step))
        balance.learn(decode, report(step, 9.0, 4, 4, 4000), float(step))
        balance.learn(decode, report(1000 + step, 9.0, 900, 4, 4000) if step == 59 else report(0, 1, 1), float(step))
    assert float(balance.prefill_cost.work(1000, 0)) == pytest.approx(2.0, rel=0.3)
    assert float(balance.decode_cost.step(4, 4004)) == pytest.approx(0.080, rel=0.15)
    assert set(balance.slowness(60.0)) == {("p000", "0"), ("ddc000", "0")}
    expected = Prediction(100, 28, 50, 0.1, 0.01, 0.2, shared_tokens=20)
    done = prefill_pb2.PrefillReport(cached_tokens=100, loaded_tokens=28, computed_tokens=50, load_us=20_000)
    before = balance.rates.rate(Source.SHARED), balance.rates.rate(Source.HOST)
    worked = balance.worked(expected, done)
    assert balance.rates.rate(Source.SHARED) < before[0], "28 tokens in 20 ms"
    assert balance.rates.rate(Source.HOST) == before[1]
    assert (worked.tokens, worked.hit_tokens) == (50, 128)
    number = fleet.forget(prefill)
    assert number is not None
    balance.forget(prefill, number)
    balance.learn(prefill, report(99, 1.0, 10), 99.0)


def test_a_newcomer_inherits_nothing_of_the_rank_that_had_its_number() -> None:
    """L14: prompts that were sent to the rank which left are no hits of the one that comes."""
    fleet = fleet_of(*prefills(2), *decodes(1))
    balance = Balance(fleet, BalanceSection())
    asked = request(text="abcdefgh")
    pair = next(balance.pairs.order(asked, no_match(fleet.numbers.size), 0.0))
    balance.pairs.chosen(asked, pair, 0.0)
    again = next(balance.pairs.order(asked, no_match(fleet.numbers.size), 0.0))
    assert again.prefill == pair.prefill
    assert again.prediction.hit_tokens > 0
    rank = pair.prefill.id
    number = fleet.forget(rank)
    assert number is not None
    balance.forget(rank, number)
    fleet.put(rank.replica_id, "2", [replace(pair.prefill, id=RankId(rank.replica_id, "2", rank.rank))])
    assert fleet.numbers.get(RankId(rank.replica_id, "2", rank.rank)) == number
    found = balance.pairs.order(asked, no_match(fleet.numbers.size), 1.0)
    assert {(one.prefill.id.incarnation, one.prediction.hit_tokens) for one in found} == {("1", 0), ("2", 0)}


class _NoPrefixes:
    """Nothing is known of any prompt."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def match(self, *_: object) -> PrefixMatch:
        return no_match(self._fleet.numbers.size)


def reserver(
    refusing: set[str],
    error: Exception,
    count: int = 4,
    prefill_count: int = 2,
    fleet: Fleet | None = None,
    neighbours: bool = True,
) -> tuple[Any, list[str], Any]:
    """A reserver at a cluster of which some decode replicas refuse; the names asked, in order."""
    fleet = fleet_of(*prefills(prefill_count), *decodes(count)) if fleet is None else fleet
    balance = Balance(fleet, BalanceSection(neighbours=neighbours))
    workers: Any = SimpleNamespace(fleet=fleet, balance=balance, broken=lambda: ())
    maker = Reserver(workers, balance.pairs, balance.conditional, _NoPrefixes(fleet), SystemClock(), 1.0)  # type: ignore[arg-type]
    asked: list[str] = []

    async def reserve_at(pair: Pair, *_: object) -> Pair:
        asked.append(pair.decode.id.replica_id)
        if pair.decode.id.replica_id in refusing:
            raise error
        return pair

    maker._reserve_at = reserve_at  # type: ignore[method-assign, assignment]
    return maker, asked, fleet


PLACED: Any = SimpleNamespace(routing=request())


async def test_select_is_reserve_down_the_list() -> None:
    """L23: whoever refuses is not asked again, the next one is."""
    full = ResourceExhausted("full", retry_after_s=1.0)
    maker, asked, fleet = reserver({"ddc000", "ddc002"}, full)
    pair = await maker.reserve(PLACED, 1, 1e9)
    assert pair.decode.id.replica_id == asked[-1]
    assert asked[-1] in ("ddc001", "ddc003")
    assert len(set(asked)) == len(asked)
    maker, asked, _ = reserver({f"ddc{index:03}" for index in range(4)}, full)
    with pytest.raises(ResourceExhausted):
        await maker.reserve(PLACED, 1, 1e9)
    assert sorted(asked) == [f"ddc{index:03}" for index in range(4)]
    assert fleet.idle


async def test_who_may_do_it_later_decides_what_is_told() -> None:
    """L12, L15: a small decode that never fits says nothing of a large one that does not answer now."""
    never, away = NeverFits("too long"), Unavailable("does not answer")
    for errors in ((never, away), (away, never)):
        left = list(errors)
        maker, _, _ = reserver(set(), never, 2)

        async def reserve_at(*_: object, left: list[HeadraceError] = left) -> Pair:
            raise left.pop(0)

        maker._reserve_at = reserve_at
        with pytest.raises(Unavailable, match="does not answer"):
            await maker.reserve(PLACED, 1, 1e9)


async def test_who_may_have_promised_room_unheard_is_not_asked_again() -> None:
    """L10, L16: it was to compute the prompt itself, and has not answered. The same number would be given back with
    that promise, whatever runs under it by then."""
    maker, asked, fleet = reserver(set(), Unavailable("x"), 2)
    first, second = (rank.id for rank in fleet.candidates(Role.DECODE))
    late = Unavailable("decode replica does not answer")

    async def reserve_at(pair: Pair, *rest: Any) -> Pair:
        asked.append(pair.decode.id.replica_id)
        if pair.decode.id == first:
            rest[-1].add(first)
            raise late
        return pair

    maker._reserve_at = reserve_at
    everything = maker._balancer.by_decode(PLACED.routing, no_match(fleet.numbers.size), 0.0, ())
    here = [pair for pair in everything if pair.decode.id == first]
    maker._conditional = SimpleNamespace(order=lambda *_: iter(here))
    unclear: set[RankId] = set()
    pair = await maker.reserve(PLACED, 1, 1e9, (), unclear)
    assert (pair.decode.id, unclear) == (second, {first})
    assert asked == [first.replica_id, second.replica_id]
    fleet.remove(second.replica_id, second.incarnation)
    with pytest.raises(Unavailable, match="answers"):
        await maker.reserve(PLACED, 1, 1e9, (), {first})


@pytest.mark.parametrize("prefill_count", [2, 1000])
async def test_refusals_are_bounded(prefill_count: int) -> None:
    """L6, L12: a cluster that is full is not asked through; the request waits for news instead. So many different ranks
    are asked, however many prefill ranks there are."""
    everybody = {f"ddc{index:03}" for index in range(100)}
    maker, asked, _ = reserver(everybody, ResourceExhausted("full", retry_after_s=1.0), 100, prefill_count)
    with pytest.raises(ResourceExhausted):
        await maker.reserve(PLACED, 1, 1e9)
    assert len(set(asked)) == len(asked) == reserve_module.MOST_REFUSALS


async def test_a_retry_avoids_what_failed_and_still_uses_it_last() -> None:
    """L16: the next attempt goes elsewhere; where there is nobody else, it goes there again."""
    maker, _, fleet = reserver(set(), Unavailable("x"), 2)
    failed = {fleet.candidates(Role.DECODE)[0].id, fleet.candidates(Role.PREFILL)[1].id}
    pair = await maker.reserve(PLACED, 2, 1e9, failed)
    assert (pair.prefill.id.replica_id, pair.decode.id.replica_id) == ("p000", "ddc001")
    everyone = {rank.id for role in (Role.PREFILL, Role.DECODE) for rank in fleet.candidates(role)}
    assert await maker.reserve(PLACED, 3, 1e9, everyone)


async def test_what_no_other_replica_could_do_better_is_raised_at_once() -> None:
    maker, asked, _ = reserver({f"ddc{index:03}" for index in range(4)}, InvalidArgument("bad"))
    with pytest.raises(InvalidArgument):
        await maker.reserve(PLACED, 1, 1e9)
    assert len(asked) == 1
    maker, asked, _ = reserver(set(), Unavailable("x"))
    too_long: Any = SimpleNamespace(routing=request(10**9))
    with pytest.raises(NeverFits):
        await maker.reserve(too_long, 1, 1e9)
    assert asked == []


async def test_a_prompt_is_too_long_only_where_capacity_is_the_reason() -> None:
    """L12: who leaves while the attempt looks for prefixes, or is in another data centre, is a reason to come back."""
    full = ResourceExhausted("full", retry_after_s=1.0)
    for role in (Role.PREFILL, Role.DECODE):
        maker, asked, fleet = reserver(set(), full, 1, 1)
        last = fleet.candidates(role)[0].id

        async def match(*_: object, fleet: Fleet = fleet, last: RankId = last) -> PrefixMatch:
            fleet.remove(last.replica_id, last.incarnation)
            return no_match(fleet.numbers.size)

        maker._prefixes.match = match
        with pytest.raises(Unavailable, match=f"last {role.value} replica") as raised:
            await maker.reserve(PLACED, 1, 1e9)
        assert raised.value.retry_after_s
        assert asked == []
    apart = fleet_of(*prefills(2, "x"), *decodes(2, "y"))
    maker, asked, _ = reserver(set(), full, fleet=apart, neighbours=False)
    with pytest.raises(Unavailable, match=r"balance\.neighbours"):
        await maker.reserve(PLACED, 1, 1e9)
    with pytest.raises(NeverFits, match="no prefill replica"):
        await maker.reserve(SimpleNamespace(routing=request(10**9)), 1, 1e9)
    small = fleet_of(*prefills(2, "x"), *decodes(2, "y", rows=2))
    maker, asked, _ = reserver(set(), full, fleet=small, neighbours=False)
    with pytest.raises(NeverFits, match="no decode replica"):
        await maker.reserve(PLACED, 1, 1e9)
    assert asked == []


def test_a_pair_counts_from_its_choice_and_a_refusal_gives_it_back() -> None:
    """L22, L10: between choosing and the answer a second request sees the first."""
    maker, _, fleet = reserver(set(), Unavailable("x"))
    balance = maker._workers.balance
    chosen, now = [], maker._clock.monotonic()
    for index in range(4):
        pair = next(balance.pairs.order(request(affinity=b"x", deadline=now + 60), no_match(fleet.numbers.size), now))
        maker._bookings.begin(pair, PLACED, common_pb2.AttemptId(request_id=str(index), attempt=1))
        chosen.append(pair)
    assert len({pair.decode for pair in chosen}) == 4
    assert len({pair.prefill for pair in chosen}) == 2
    assigned = fleet.loads(Role.PREFILL, now).assigned.sum()
    for index, pair in enumerate(chosen):
        maker._bookings.end(pair, common_pb2.AttemptId(request_id=str(index), attempt=1), Amount())
    assert fleet.idle
    assert fleet.loads(Role.PREFILL, now).assigned.sum() < 0.01 * assigned
