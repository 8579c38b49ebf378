"""The clever halves against plain twins: what a watch tells, and who the embedded table believes alive."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.runtime.clock import ManualClock
from headrace.services.runtime.registry.base import (
    Added,
    Capacity,
    Changed,
    Event,
    IncompatibleReplicaError,
    LeaseLostError,
    LostReason,
    Removed,
    Replica,
    Role,
    State,
)
from headrace.services.runtime.registry.follow import Follower
from headrace.services.runtime.registry.table import MembershipTable


def _replica(identifier: str, life: int = 0, state: State = State.READY, role: Role = Role.ROUTER) -> Replica:
    return Replica(identifier, f"{life:032x}", role, "dc", "h", "127.0.0.1:1", state)


replicas = st.builds(
    _replica, st.sampled_from("abc"), st.integers(0, 2), st.sampled_from(list(State)), st.just(Role.ROUTER)
)
states = st.lists(replicas, max_size=4).map(lambda many: list({one.id: one for one in many}.values()))


def _apply(known: dict[str, Replica], events: list[Event]) -> None:
    """The plain twin: a consumer that believes each event literally and notices any that cannot be."""
    for event in events:
        one = event.replica
        match event:
            case Added():
                assert one.id not in known
                known[one.id] = one
            case Changed():
                assert known[one.id].incarnation == one.incarnation
                assert known[one.id] != one
                known[one.id] = one
            case Removed():
                assert known.pop(one.id) == one


@given(st.lists(st.one_of(states, replicas, st.sampled_from("abc")), max_size=20))
def test_a_consumer_of_events_knows_what_is_true(news: list[list[Replica] | Replica | str]) -> None:
    """L14: at each moment the events told so far add up to the membership, and no life follows another silently."""
    follower, known, truth = Follower(), dict[str, Replica](), dict[str, Replica]()
    for item in news:
        if isinstance(item, list):
            truth = {one.id: one for one in item}
            _apply(known, follower.reset(item))
        elif isinstance(item, Replica):
            truth[item.id] = item
            _apply(known, follower.put(item))
        else:
            truth.pop(item, None)
            _apply(known, follower.removed(item))
        assert known == truth


def test_a_late_removal_of_a_former_life_does_not_remove_its_successor() -> None:
    """L14."""
    follower = Follower()
    follower.put(_replica("a", 1))
    assert follower.removed("a", f"{0:032x}") == []
    assert follower.removed("a", f"{1:032x}") == [Removed(_replica("a", 1))]


def test_roles_filter_events_but_not_knowledge() -> None:
    follower = Follower(frozenset({Role.DECODE}))
    assert follower.put(_replica("a")) == []
    decode = replace(_replica("a", 1), role=Role.DECODE, model_name="m", layout_fp=b"L" * 32, model_fp=b"M" * 32)
    assert follower.put(decode) == [Added(decode)]
    assert follower.reset([]) == [Removed(decode)]


def test_the_reaper_frees_without_new_admissions() -> None:
    """L9: nothing but the reaper's own clock is needed; L8: a renewed lease lives on."""
    clock = ManualClock()
    table = MembershipTable(clock)
    table.register(_replica("dead"), 4.0)
    lease = table.register(_replica("live"), 4.0)
    gone: list[Replica] = []
    for _ in range(16):
        clock.advance(0.5)
        table.renew("live", f"{0:032x}", lease)
        gone += table.reap()
    assert gone == [_replica("dead")]
    assert table.members() == (_replica("live"),)


def test_time_in_which_the_registry_was_deaf_counts_for_nobody() -> None:
    """L8: a registry that was stopped for a minute could hear no renewal; that is no evidence of death."""
    clock = ManualClock()
    table = MembershipTable(clock)
    lease = table.register(_replica("a"), 4.0)
    clock.advance(60.0)
    assert table.reap() == []
    table.renew("a", f"{0:032x}", lease)
    for _ in range(8):
        clock.advance(0.5)
        gone = table.reap()
    assert gone == [_replica("a")]


@given(st.lists(st.tuples(st.sampled_from(["register", "renew", "leave", "tick"]), st.sampled_from("ab")), max_size=40))
def test_the_table_agrees_with_a_plain_dictionary(steps: list[tuple[str, str]]) -> None:
    clock = ManualClock()
    table = MembershipTable(clock)
    alive: dict[str, tuple[int, float]] = {}
    leases: dict[str, tuple[int, str]] = {}
    for life, (what, who) in enumerate(steps):
        if what == "register":
            leases[who] = (life, table.register(_replica(who, life), 2.0))
            alive[who] = (life, clock.monotonic() + 2.0)
        elif what == "tick":
            clock.advance(0.25)
            table.reap()
            alive = {one: (at, end) for one, (at, end) in alive.items() if end > clock.monotonic()}
        elif who in leases:
            at, lease = leases[who]
            if what == "leave":
                table.deregister(who, lease)
                alive.pop(who, None)
            elif who in alive:
                table.renew(who, f"{at:032x}", lease)
                alive[who] = (at, clock.monotonic() + 2.0)
            else:
                with pytest.raises(LeaseLostError):
                    table.renew(who, f"{at:032x}", lease)
        assert {one.id: one.incarnation for one in table.members()} == {
            one: f"{at:032x}" for one, (at, _) in alive.items()
        }


def test_a_lost_lease_says_why() -> None:
    table = MembershipTable(ManualClock())
    old = table.register(_replica("a", 0), 1.0)
    table.register(_replica("a", 1), 1.0)
    for incarnation, lease, reason in ((0, old, LostReason.REPLACED), (1, old, LostReason.EXPIRED)):
        with pytest.raises(LeaseLostError) as caught:
            table.renew("a", f"{incarnation:032x}", lease)
        assert caught.value.reason is reason
    table.deregister("a", old)
    assert len(table.members()) == 1


async def test_waiters_see_every_revision_change() -> None:
    table = MembershipTable(ManualClock())
    waiter = asyncio.create_task(table.wait_newer(table.revision))
    await asyncio.sleep(0)
    table.register(_replica("a"), 1.0)
    assert await waiter == table.revision == 1


def test_what_the_router_asks_any_one_worker_is_the_same_of_all() -> None:
    """L14, L25: else one worker that joins with other keys or blocks breaks the requests of all tenants."""

    def engine(identifier: str, row: bytes = b"R", block_tokens: int = 16, context_tokens: int = 64) -> Replica:
        return replace(
            _replica(identifier, role=Role.DECODE),
            model_name="m",
            layout_fp=b"L" * 32,
            model_fp=b"M" * 32,
            row_fp=row * 32,
            capacity=Capacity(block_tokens=block_tokens, context_tokens=context_tokens),
        )

    table = MembershipTable(ManualClock())
    table.register(engine("a"), 5.0)
    for other in (
        engine("b", row=b""),
        engine("b", row=b"X"),
        engine("b", block_tokens=0),
        engine("b", context_tokens=8),
    ):
        with pytest.raises(IncompatibleReplicaError, match="differs"):
            table.register(other, 5.0)
    table.register(engine("b"), 5.0)
