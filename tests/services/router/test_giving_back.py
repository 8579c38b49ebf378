"""An attempt gives its reservation back at once, however it is ended (L10, L11)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.router.topology import RankId
from headrace.services.router.attach import Feed
from headrace.services.router.attempt import Attempts
from headrace.services.router.generate import _before
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.errors import (
    DeadlineExceeded,
    HeadraceError,
    Internal,
    Unavailable,
    trailing_metadata,
)
from headrace.v1 import common_pb2, decode_pb2, prefill_pb2


class _Feed:
    """Has one event; the next one never comes."""

    def __init__(self) -> None:
        self.attempt = common_pb2.AttemptId(request_id="r", attempt=1)
        self.sent = False

    async def next(self) -> decode_pb2.RequestEvents:
        if self.sent:
            await asyncio.Event().wait()
        self.sent = True
        return decode_pb2.RequestEvents()

    def consume(self, tokens: int) -> None:
        """Nothing to grant."""

    def put(self, item: object) -> None:
        """Nobody listens."""


async def test_a_second_cancellation_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write ends the call, and gRPC cancels its task on top: the attempt's end waits for nothing, so the feed
    is closed before that can arrive, or decode would keep the request, and the balancer its load, for ever."""
    ended: list[str] = []

    async def prefill(*_: object) -> None:
        await asyncio.Event().wait()

    link = SimpleNamespace(close=lambda feed, reason=None: ended.append("feed"))
    loads = SimpleNamespace(end=lambda rank, *_: ended.append(rank))
    workers: Any = SimpleNamespace(fleet=loads, on_news=lambda: None, spawn=asyncio.ensure_future)
    pair = SimpleNamespace(decode=SimpleNamespace(id="decode"), prefill=SimpleNamespace(id="prefill"))
    reservation: Any = SimpleNamespace(link=link, feed=_Feed(), pair=pair)
    placed: Any = SimpleNamespace(spec=common_pb2.RequestSpec())
    attempts = Attempts(workers, SimpleNamespace(), SystemClock())  # type: ignore[arg-type]
    monkeypatch.setattr(attempts, "_call", lambda *_: SimpleNamespace(initial_metadata=lambda: asyncio.sleep(0)))
    monkeypatch.setattr(attempts, "_prefill", prefill)
    given = asyncio.Event()

    async def call() -> None:
        async with aclosing(attempts.events(placed, SimpleNamespace(), reservation, 1, 1e9)) as events:  # type: ignore[arg-type]
            async for _ in events:
                given.set()
                raise ConnectionError("the client is gone")

    task = asyncio.create_task(call())
    await given.wait()
    task.cancel()
    with pytest.raises(ConnectionError):
        await task
    assert ended == ["feed", "decode", "prefill"]


def _attempt(monkeypatch: pytest.MonkeyPatch, prefill: Callable[..., Awaitable[None]]) -> tuple[Attempts, Any, Feed]:
    """An attempt whose prefill is the given coroutine, and its feed."""
    feed = Feed(common_pb2.AttemptId(request_id="r", attempt=1), 8, lambda _: None)
    link = SimpleNamespace(close=lambda feed, reason=None: None)
    fleet = SimpleNamespace(end=lambda rank, key, *_: None)
    workers: Any = SimpleNamespace(fleet=fleet, on_news=lambda: None, spawn=asyncio.ensure_future)
    workers.balance = SimpleNamespace(finished=lambda tokens, choices: None)
    reservation: Any = SimpleNamespace(
        link=link,
        feed=feed,
        pair=SimpleNamespace(decode=SimpleNamespace(id="d"), prefill=SimpleNamespace(id="p")),
        target_lost=False,
    )
    attempts = Attempts(workers, SimpleNamespace(), SystemClock())  # type: ignore[arg-type]
    monkeypatch.setattr(attempts, "_call", lambda *_: SimpleNamespace(initial_metadata=lambda: asyncio.sleep(0)))
    monkeypatch.setattr(attempts, "_prefill", prefill)
    return attempts, reservation, feed


async def _follow(attempts: Attempts, reservation: Any, deadline: float, seen: list[decode_pb2.RequestEvents]) -> None:
    placed: Any = SimpleNamespace(spec=common_pb2.RequestSpec(), routing=SimpleNamespace(choices=1))
    images: Any = SimpleNamespace()
    async for events in attempts.events(placed, images, reservation, 1, deadline):
        seen.append(events)


@pytest.mark.parametrize("tokens", [True, False])
async def test_a_failed_prefill_ends_the_attempt_unless_decode_has_it(
    monkeypatch: pytest.MonkeyPatch, *, tokens: bool
) -> None:
    """L15: a prefill that dies after its hand-over is decode's no more; before it, the attempt fails at once."""

    async def prefill(*_: object) -> None:
        raise Unavailable("prefill is gone")

    attempts, reservation, feed = _attempt(monkeypatch, prefill)
    seen: list[decode_pb2.RequestEvents] = []
    following = asyncio.ensure_future(_follow(attempts, reservation, 1e9, seen))
    if tokens:
        feed.put(decode_pb2.RequestEvents(tokens=[common_pb2.TokensEvent(token_ids=(1,))]))
        feed.put(decode_pb2.RequestEvents(report=decode_pb2.DecodeReport()))
        await following
        assert len(seen) == 2
    else:
        with pytest.raises(Unavailable, match="prefill is gone"):
            await following


@pytest.mark.parametrize(
    ("code", "told", "recalled", "gone"),
    [
        (grpc.StatusCode.UNAVAILABLE, False, True, True),
        (grpc.StatusCode.INTERNAL, False, True, False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False, True, False),
        (grpc.StatusCode.UNAVAILABLE, True, True, False),
        (grpc.StatusCode.INTERNAL, True, False, False),
    ],
)
async def test_a_run_that_broke_without_prefills_word_is_recalled(
    monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode, *, told: bool, recalled: bool, gone: bool
) -> None:
    """L7: it may never have arrived, and its rows would wait for a word that nobody says. Only of one that cannot be
    reached another one is waited for."""
    word = Unavailable("this replica is draining") if code is grpc.StatusCode.UNAVAILABLE else Internal("a defect")
    error = trailing_metadata(word) if told else ()
    failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*error), "broken")

    class Call:
        """Of a run."""

        async def __aiter__(self) -> AsyncIterator[prefill_pb2.RunResponse]:
            raise failure
            yield

        def cancel(self) -> None:
            """It is over."""

    asked: list[object] = []

    async def recall(reservation: object) -> None:
        asked.append(reservation)

    fleet = SimpleNamespace(end=lambda *_: None)
    workers: Any = SimpleNamespace(fleet=fleet, spawn=asyncio.ensure_future)
    attempts = Attempts(workers, SimpleNamespace(drop=lambda _: None), SystemClock())  # type: ignore[arg-type]
    monkeypatch.setattr(attempts, "_recall", recall)
    pair = SimpleNamespace(
        prefill=SimpleNamespace(id=RankId("p", "1", 0)), decode=SimpleNamespace(id=RankId("d", "1", 0))
    )
    feed = SimpleNamespace(attempt=common_pb2.AttemptId())
    reservation: Any = SimpleNamespace(pair=pair, feed=feed, expectation=None, prefill_gone=False)
    with pytest.raises(HeadraceError):
        await attempts._prefill(Call(), reservation)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert (asked == [reservation], reservation.prefill_gone) == (recalled, gone)


async def test_a_silent_decode_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """L6: decode was to say that the deadline has passed; if it does not, the router does."""

    async def prefill(*_: object) -> None:
        await asyncio.Event().wait()

    attempts, reservation, _ = _attempt(monkeypatch, prefill)

    async def leave(call: object, run: asyncio.Task[None], *_: object) -> None:
        run.cancel()

    monkeypatch.setattr(attempts, "_leave", leave)
    seen: list[decode_pb2.RequestEvents] = []
    with pytest.raises(DeadlineExceeded):
        await _follow(attempts, reservation, -1e9, seen)
    assert not seen


async def test_work_that_comes_too_late_still_cleans_up() -> None:
    """L6: a deadline that has passed ends the work after it has begun, not instead of it."""
    cleaned: list[bool] = []

    async def work() -> AsyncIterator[int]:
        try:
            await asyncio.Event().wait()
            yield 1
        finally:
            cleaned.append(True)

    clock = SystemClock()
    with pytest.raises(DeadlineExceeded):
        await _before(clock.monotonic() - 1, clock, anext(work()), "in a test")
    assert cleaned == [True]
