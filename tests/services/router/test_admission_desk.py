"""The queue on the event loop: everybody is called, refused or told that it is too late, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from headrace.router.admission import Admission, AdmissionLimits, Cause, Ticket
from headrace.router.balancers.base import Rejected
from headrace.services.router.admission import AdmissionDesk, Turn
from headrace.services.runtime.clock import ManualClock, SystemClock
from headrace.services.runtime.errors import DeadlineExceeded, ResourceExhausted

CLOCK = SystemClock()


def ticket(name: str, left_s: float = 60.0, priority: int = 0) -> Ticket:
    return Ticket(name, b"t", priority, 10, CLOCK.monotonic() + left_s)


@asynccontextmanager
async def running(limits: AdmissionLimits) -> AsyncIterator[AdmissionDesk]:
    desk = AdmissionDesk(Admission(limits), CLOCK)
    clock = asyncio.create_task(desk.run())
    try:
        yield desk
        assert desk.idle
    finally:
        clock.cancel()
        await asyncio.gather(clock, return_exceptions=True)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not check():  # noqa: ASYNC110 - the desk has no event for it
            await asyncio.sleep(0)


async def enter(desk: AdmissionDesk, one: Ticket, then: Callable[[Turn], Awaitable[None]]) -> None:
    async with desk.admitted(one) as turn:
        await then(turn)


async def test_waits_for_its_turn_and_gives_it_up() -> None:
    """L10: leaving in any way, waiting or running, calls the next."""
    async with running(AdmissionLimits(max_running=1, max_waiting=2)) as desk:
        called = asyncio.Event()

        async def note(_: Turn) -> None:
            called.set()

        async with AsyncExitStack() as first:
            await first.enter_async_context(desk.admitted(ticket("a")))
            gives_up = asyncio.create_task(enter(desk, ticket("b"), note))
            stays = asyncio.create_task(enter(desk, ticket("c"), note))
            await until(lambda: desk.waiting == 2)
            with pytest.raises(ResourceExhausted) as full:
                async with desk.admitted(ticket("d")):
                    pytest.fail("the queue is full")
            assert full.value.retry_after_s is not None
            assert full.value.retry_after_s > 0
            gives_up.cancel()
            await asyncio.gather(gives_up, return_exceptions=True)
            assert desk.waiting == 1
        await stays
        assert called.is_set()
        assert desk.rejected == {Cause.REQUESTS: 1}


async def test_no_room_waits_for_news() -> None:
    """L12: it is tried again when there is news of room, and then the one behind it."""
    async with running(AdmissionLimits(max_running=9, max_waiting=9)) as desk:
        tries: list[str] = []
        rooms = 0

        def reserve(name: str) -> Callable[[Turn], Awaitable[None]]:
            async def attempt(turn: Turn) -> None:
                nonlocal rooms
                tries.append(name)
                while not rooms:
                    await turn.again()
                    tries.append(name)
                rooms -= 1
                turn.placed()

            return attempt

        first = asyncio.create_task(enter(desk, ticket("first"), reserve("first")))
        await until(lambda: bool(tries))
        second = asyncio.create_task(enter(desk, ticket("second"), reserve("second")))
        await until(lambda: desk.waiting == 2)
        rooms = 1
        desk.news()
        await first
        await until(lambda: tries[-1] == "second")
        rooms = 1
        desk.news()
        await second


async def test_without_news_room_is_asked_for_all_the_same() -> None:
    """L9: another router's requests end without a word to this one."""
    async with running(AdmissionLimits(max_running=9, max_waiting=9)) as desk, desk.admitted(ticket("a")) as turn:
        await asyncio.wait_for(turn.again(), 30.0)


async def test_no_queue_refuses_at_once() -> None:
    async with running(AdmissionLimits(max_running=9, max_waiting=0)) as desk:
        with pytest.raises(ResourceExhausted, match="room"):
            async with desk.admitted(ticket("a")) as turn:
                await turn.again()
        assert desk.rejected == {Cause.ROOM: 1}


async def test_too_late_is_told_while_it_waits() -> None:
    """L6, L9: by the desk's own clock, though nothing else happens."""
    async with running(AdmissionLimits(max_running=1, max_waiting=9)) as desk, desk.admitted(ticket("a")):
        with pytest.raises(DeadlineExceeded, match="cannot be met"):
            async with desk.admitted(ticket("b", left_s=0.02)):
                pytest.fail("it can never run")
        assert desk.rejected == {Cause.LATE: 1}


async def test_foreseen_overload_is_overload() -> None:
    """L12: a balancer's rejection is RESOURCE_EXHAUSTED with its time to come back."""
    async with running(AdmissionLimits(max_running=1, max_waiting=9)) as desk:
        with pytest.raises(ResourceExhausted, match="token times") as refused:
            async with desk.admitted(ticket("a")) as turn:
                turn.foreseen(Rejected("decode would miss its token times", 2.5))
        assert refused.value.retry_after_s == 2.5
        assert desk.rejected == {Cause.PREDICTED: 1}


async def test_the_displaced_one_is_told() -> None:
    async with running(AdmissionLimits(max_running=1, max_waiting=1)) as desk, AsyncExitStack() as stack:

        async def nothing(_: Turn) -> None:
            pass

        await stack.enter_async_context(desk.admitted(ticket("a")))
        low = asyncio.create_task(enter(desk, ticket("low", priority=-1), nothing))
        await until(lambda: desk.waiting == 1)
        high = asyncio.create_task(enter(desk, ticket("high"), nothing))
        with pytest.raises(ResourceExhausted, match="higher priority"):
            await low
        await stack.aclose()
        await high


async def test_late_first_tokens_bound_what_can_be_in_time() -> None:
    """L6: of requests that had no more to do, and of late ones only: whom the bound refuses leaves no newer figure."""
    clock = ManualClock()
    desk = AdmissionDesk(Admission(AdmissionLimits(max_running=9, max_waiting=9)), clock)

    async def takes(seconds: float, tokens: int) -> None:
        async with desk.admitted(Ticket(f"{tokens}/{seconds}", b"t", 0, tokens, 1e9)) as turn:
            clock.advance(seconds)
            turn.delivered()
            clock.advance(1.0)
            turn.delivered()

    assert desk.fastest_s(10**6) == 0.0
    await takes(3.0, 1000)
    await takes(2.0, 900)
    await takes(4.0, 800)
    assert (desk.fastest_s(1000), desk.fastest_s(899), desk.fastest_s(799)) == (2.0, 4.0, 0.0)
    clock.advance(31.0)
    assert desk.fastest_s(1000) == 0.0
    assert desk.idle
