"""The stream to a decode replica: what the router says on it, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.services.router.attach import DecodeLink, Overtaken
from headrace.services.runtime.errors import Unavailable
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc

PATIENCE_S = 60.0


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Keeps what it is told, and says what it is given; None breaks the stream."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[decode_pb2.AttachRequest] = asyncio.Queue()
        self.says: asyncio.Queue[decode_pb2.AttachResponse | None] = asyncio.Queue()
        self.incarnation = "1"
        self.refuses = False
        self.streams = 0

    async def Attach(
        self, requests: AsyncIterator[decode_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[decode_pb2.AttachResponse]:
        self.streams += 1
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not here")
        yield decode_pb2.AttachResponse(decode=common_pb2.PeerId(replica_id="fake", incarnation=self.incarnation))

        async def hear() -> None:
            async for request in requests:
                self.heard.put_nowait(request)

        hearing = asyncio.create_task(hear())
        try:
            while (said := await self.says.get()) is not None:
                yield said
        finally:
            hearing.cancel()

    async def next(self) -> decode_pb2.AttachRequest:
        return await asyncio.wait_for(self.heard.get(), PATIENCE_S)


@asynccontextmanager
async def attached(
    renew_s: float, silence_s: float = 1e4, on_broken: Callable[[bool], None] = lambda broken: None, life: str = ""
) -> AsyncIterator[tuple[FakeDecode, DecodeLink]]:
    """A link to a decode that listens."""
    decode, server = FakeDecode(), grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    link = DecodeLink(
        common_pb2.PeerId(replica_id="router"),
        channel,
        renew_s=renew_s,
        silence_s=silence_s,
        credit_tokens=8,
        on_load=lambda load: None,
        on_broken=on_broken,
        life=life,
    )
    try:
        yield decode, link
    finally:
        await link.stop()
        await channel.close()
        await server.stop(0)


async def test_a_grant_names_only_whom_it_is_for() -> None:
    """L8: leases are renewed for all, on a clock; a grant of credit in between costs one entry, not one per request."""
    async with attached(renew_s=3600.0) as (decode, link):
        first = await decode.next()
        assert first.router.replica_id == "router"
        assert not first.requests
        feeds = [link.open(common_pb2.AttemptId(request_id=f"r{index}", attempt=1)) for index in range(3)]
        told = set()
        for feed in feeds:
            link.keep(feed)
            told |= {one.id.request_id for one in (await decode.next()).requests}
        assert told == {feed.attempt.request_id for feed in feeds}
        feeds[1].consume(4)
        grant = await decode.next()
        assert [(one.id.request_id, one.credit_tokens) for one in grant.requests] == [("r1", 12)]
        assert not grant.HasField("router")
        link.close(feeds[1], common_pb2.FINISH_REASON_CANCELLED)
        end = await decode.next()
        assert [one.id.request_id for one in end.cancels] == ["r1"]
        assert not end.requests


async def test_who_comes_after_its_end_does_not_wait() -> None:
    """L6: the replica has left while its orphan was on the way to the router that adopts it."""
    async with attached(renew_s=3600.0) as (decode, link):
        await decode.next()
        await link.attached.wait()
        await link.stop()
        feed = link.open(common_pb2.AttemptId(request_id="r", attempt=1), (3,))
        link.keep(feed)
        with pytest.raises(Unavailable, match="gone"):
            await asyncio.wait_for(feed.next(), PATIENCE_S)


async def test_everything_live_is_renewed_on_the_clock() -> None:
    """L8: whoever is live is named again every `renew_s`, whatever else is said."""
    async with attached(renew_s=0.05) as (decode, link):
        feeds = [link.open(common_pb2.AttemptId(request_id=f"r{index}", attempt=1)) for index in range(2)]
        for feed in feeds:
            link.keep(feed)
        renewals = 0
        while renewals < 3:
            renewals += len((await decode.next()).requests) == len(feeds)


def attempt(name: str) -> common_pb2.AttemptId:
    return common_pb2.AttemptId(request_id=name, attempt=1)


def said(name: str, *ids: int, choice: int = 0) -> decode_pb2.AttachResponse:
    tokens = common_pb2.TokensEvent(choice=choice, token_ids=ids)
    return decode_pb2.AttachResponse(requests=[decode_pb2.RequestEvents(id=attempt(name), tokens=[tokens])])


async def test_a_stream_that_breaks_goes_on_from_what_has_arrived() -> None:
    """L15: the new stream says how many tokens of each choice are here; the requests live on."""
    async with attached(renew_s=3600.0) as (decode, link):
        await decode.next()
        feed = link.open(attempt("r"))
        link.keep(feed)
        await decode.next()
        for event in (said("r", 1, 2), said("r", 3, choice=1), None):
            decode.says.put_nowait(event)
        first = await decode.next()
        assert first.router.replica_id == "router"
        assert [list(one.received_tokens) for one in first.requests] == [[2, 1]]
        decode.says.put_nowait(said("r", 4))
        got = [list((await feed.next()).tokens[0].token_ids) for _ in range(3)]
        assert got == [[1, 2], [3], [4]]


async def test_a_stream_that_cannot_be_opened_again_fails_its_requests() -> None:
    """L15: decode is dead; it took one try to know."""
    told: list[bool] = []
    async with attached(renew_s=3600.0, on_broken=told.append) as (decode, link):
        feed = link.open(attempt("r"))
        await decode.next()
        decode.refuses = True
        decode.says.put_nowait(None)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(feed.next(), PATIENCE_S)
        assert told[:2] == [False, True]
        assert not link.attached.is_set()


async def test_a_replica_that_was_restarted_has_forgotten() -> None:
    """L14: another life answers at the same address."""
    async with attached(renew_s=3600.0) as (decode, link):
        feed = link.open(attempt("r"))
        await decode.next()
        decode.incarnation = "2"
        decode.says.put_nowait(None)
        with pytest.raises(Unavailable, match="restarted"):
            await asyncio.wait_for(feed.next(), PATIENCE_S)


async def test_a_link_is_for_one_life() -> None:
    """L14: the next life at the same address has a link of its own. Two of one router would take each other's stream
    for ever, until the registry knows that the former life is over."""
    told: list[bool] = []
    async with attached(renew_s=0.05, on_broken=told.append, life="0") as (decode, link):
        feed = link.open(attempt("r"))
        with pytest.raises(Unavailable, match="restarted"):
            await asyncio.wait_for(feed.next(), PATIENCE_S)
        assert told == [True]
        with pytest.raises(Unavailable, match="restarted"):
            await asyncio.wait_for(link.open(attempt("s")).next(), PATIENCE_S)
        await asyncio.sleep(0.5)
        assert decode.streams == 1


async def test_a_cancel_that_comes_with_the_end_of_a_call_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica leaves while its stream breaks: grpc.aio then keeps the cancel to itself."""

    async def ends(link: DecodeLink) -> tuple[str, bool]:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "the stream broke", False

    monkeypatch.setattr(DecodeLink, "_stream", ends)
    async with attached(renew_s=3600.0) as (_, link):
        await asyncio.sleep(0)
        await asyncio.wait_for(link.stop(), PATIENCE_S)


async def test_a_silent_replica_counts_as_stalled() -> None:
    """L15: the connection stands and nothing comes, though every word is answered by a replica that runs."""
    told: list[bool] = []
    async with attached(renew_s=0.1, silence_s=1.5, on_broken=told.append) as (decode, link):
        feed = link.open(attempt("r"))
        await decode.next()
        with pytest.raises(Unavailable, match="has said nothing"):
            await asyncio.wait_for(feed.next(), PATIENCE_S)
        assert told[:2] == [False, True]


async def test_a_request_that_was_resumed_elsewhere_is_over_here() -> None:
    """L16: and its end here does not cancel it there."""
    async with attached(renew_s=3600.0) as (decode, link):
        feed = link.open(attempt("r"))
        link.keep(feed)
        decode.says.put_nowait(decode_pb2.AttachResponse(overtaken=[attempt("r")]))
        with pytest.raises(Overtaken):
            await asyncio.wait_for(feed.next(), PATIENCE_S)
        link.close(feed, common_pb2.FINISH_REASON_CANCELLED)
        other = link.open(attempt("other"))
        link.keep(other)
        heard = []
        while not any(one.id.request_id == "other" for message in heard for one in message.requests):
            heard.append(await decode.next())
        assert not any(message.cancels for message in heard)


async def test_an_adopted_request_says_what_it_has_once() -> None:
    """Decode waits for that, so that no event comes before there is a feed for it; the credit counts from there."""
    async with attached(renew_s=3600.0) as (decode, link):
        await decode.next()
        old = link.open(attempt("r"))
        link.detach("r")
        with pytest.raises(Overtaken):
            await old.next()
        feed = link.open(attempt("r"), received=(5,))
        link.close(old, common_pb2.FINISH_REASON_CANCELLED)
        link.keep(feed)
        (named,) = (await decode.next()).requests
        assert (list(named.received_tokens), named.credit_tokens) == ([5], 13)
        link.keep(feed)
        (named,) = (await decode.next()).requests
        assert not named.received_tokens


async def test_a_decode_that_cannot_be_reached_leaves_no_task_behind() -> None:
    """L6: each try to open the stream ends with all that it began."""
    channel = grpc.aio.insecure_channel("0.0.0.1:9")  # nowhere, which is known at once
    broken = asyncio.Event()
    link = DecodeLink(
        common_pb2.PeerId(replica_id="router"),
        channel,
        renew_s=1e4,
        silence_s=1e4,
        credit_tokens=8,
        on_load=lambda load: None,
        on_broken=lambda _: broken.set(),
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                await broken.wait()
                broken.clear()
    finally:
        await link.stop()
        await channel.close()
    left = [
        task for task in asyncio.all_tasks() if "consume_request_iterator" in repr(task) or "decode" in task.get_name()
    ]
    assert not left
