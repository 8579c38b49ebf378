"""Calls to an etcd of several members, of which one stops answering."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from headrace.services.runtime.registry._etcd import rpc_pb2 as pb
from headrace.services.runtime.registry._etcd import rpc_pb2_grpc as stubs
from headrace.services.runtime.registry.base import RegistryUnavailableError
from headrace.services.runtime.registry.etcd_client import EtcdClient
from headrace.services.runtime.settings import RpcSettings

PATIENCE_S = 60.0


class Member(stubs.KVServicer, stubs.WatchServicer):
    """Of etcd: it watches in silence, and cannot be asked where it is `cut_off`."""

    def __init__(self, *, cut_off: bool) -> None:
        self.cut_off = cut_off
        self.asked = 0
        self.watched = asyncio.Event()

    async def Range(self, request: pb.RangeRequest, context: Any) -> pb.RangeResponse:
        self.asked += 1
        if self.cut_off:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no leader")
        return pb.RangeResponse()

    async def Watch(self, requests: Any, context: Any) -> Any:
        await anext(aiter(requests))
        self.watched.set()
        await asyncio.Event().wait()
        yield pb.WatchResponse()


async def serve(member: Member) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    stubs.add_KVServicer_to_server(member, server)  # type: ignore[no-untyped-call]
    stubs.add_WatchServicer_to_server(member, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_a_watch_hears_that_its_member_was_left() -> None:
    """L6, L14: another call led away from the member; a watch that ended in silence would leave its process with the
    members of that moment for ever. Calls that fail together lead on by one member, not by one each."""
    members = [Member(cut_off=True), Member(cut_off=False), Member(cut_off=True)]
    served = [await serve(member) for member in members]
    client = EtcdClient([address for _, address in served], RpcSettings(), PATIENCE_S)
    watch = client.watch_prefix(b"p/", 1)
    try:
        async with asyncio.timeout(PATIENCE_S):
            watching = asyncio.ensure_future(anext(watch))
            await members[0].watched.wait()
            asked = await asyncio.gather(*(client.read(b"k") for _ in range(3)), return_exceptions=True)
            assert {type(each) for each in asked} == {RegistryUnavailableError}
            with pytest.raises(RegistryUnavailableError):
                await watching
            assert await client.read(b"k") is None
        assert [members[1].asked, members[2].asked] == [1, 0]
        again = client.watch_prefix(b"p/", 1)
        watching = asyncio.ensure_future(anext(again))
        async with asyncio.timeout(PATIENCE_S):
            await members[1].watched.wait()
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
    finally:
        await client.close()
        for server, _ in served:
            await server.stop(0)


async def test_a_watch_that_is_not_under_way_yet_hears_it_too() -> None:
    """L6: the member takes connections and answers nothing, as one that stands still; grpc.aio lets what is still to be
    written to a channel that is closed wait for ever."""
    still = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    server, address = await serve(Member(cut_off=False))
    port = still.sockets[0].getsockname()[1]
    client = EtcdClient([f"127.0.0.1:{port}", address], RpcSettings(), 0.3)
    try:
        async with asyncio.timeout(PATIENCE_S):
            watching = asyncio.ensure_future(anext(client.watch_prefix(b"p/", 1)))
            with pytest.raises(RegistryUnavailableError):
                await client.read(b"k")
            with pytest.raises(RegistryUnavailableError):
                await watching
    finally:
        await client.close()
        await server.stop(0)
        still.close()
