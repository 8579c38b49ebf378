"""The stream to a decode replica: what the router says on it, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from headrace.services.router.attach import DecodeLink
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc

PATIENCE_S = 20.0


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[decode_pb2.AttachRequest] = asyncio.Queue()

    async def Attach(
        self, requests: AsyncIterator[decode_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[decode_pb2.AttachResponse]:
        yield decode_pb2.AttachResponse(decode=common_pb2.PeerId(replica_id="fake"))
        async for request in requests:
            self.heard.put_nowait(request)

    async def next(self) -> decode_pb2.AttachRequest:
        return await asyncio.wait_for(self.heard.get(), PATIENCE_S)


@asynccontextmanager
async def attached(renew_s: float) -> AsyncIterator[tuple[FakeDecode, DecodeLink]]:
    """A link to a decode that listens."""
    decode, server = FakeDecode(), grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    link = DecodeLink(
        common_pb2.PeerId(replica_id="router"), channel, renew_s=renew_s, credit_tokens=8, on_load=lambda load: None
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


async def test_everything_live_is_renewed_on_the_clock() -> None:
    """L8: whoever is live is named again every `renew_s`, whatever else is said."""
    async with attached(renew_s=0.05) as (decode, link):
        feeds = [link.open(common_pb2.AttemptId(request_id=f"r{index}", attempt=1)) for index in range(2)]
        for feed in feeds:
            link.keep(feed)
        renewals = 0
        while renewals < 3:
            renewals += len((await decode.next()).requests) == len(feeds)
