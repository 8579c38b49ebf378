"""A decode serves a router in that router's own name only (L25)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.kvcache.transfer.base import PeerDescription
from headrace.services.decode.service import DecodeServicer
from headrace.services.runtime import peers
from headrace.services.runtime.clock import ManualClock
from headrace.services.runtime.errors import InvalidArgument, PermissionDenied
from headrace.services.worker.signing import UNSIGNED
from headrace.v1 import common_pb2, decode_pb2

OWN = "0" * 31 + "1"
CALLER = peers.Peer(peers.PeerRole.ROUTER, "router-0")


class Hub:
    """Nothing to adopt; notes for whom it was asked."""

    def __init__(self) -> None:
        self.adopted_for: list[str] = []

    def adopt(
        self, request_id: str, content: bytes, offsets: list[int], router: str, single: Callable[[int], bytes]
    ) -> decode_pb2.AdoptResponse:
        self.adopted_for.append(router)
        return decode_pb2.AdoptResponse()


def servicer(hub: Hub) -> Any:
    unused: Any = None
    facts: Any = SimpleNamespace(wire=common_pb2.ModelIdentity)
    transfer: Any = SimpleNamespace(describe=lambda: PeerDescription(OWN, 0, "0.x", b"", 1, (), None, b"M" * 32))
    peer = common_pb2.PeerId(replica_id="decode-0", incarnation=OWN)
    served: Any = hub
    return DecodeServicer(facts, unused, peer, transfer, unused, served, unused, ManualClock(), 16, UNSIGNED)


def spec(router: str, incarnation: str = "1" * 32) -> common_pb2.RequestSpec:
    return common_pb2.RequestSpec(
        id=common_pb2.AttemptId(request_id="r", attempt=1),
        router=common_pb2.PeerId(replica_id=router, incarnation=incarnation),
    )


async def as_router(call: Any, request: Any) -> None:
    """In a task of its own, as the server does, since the caller's identity is the task's."""

    async def run() -> None:
        peers.enter(CALLER)
        await call(request, None)

    await asyncio.create_task(run())


@pytest.mark.parametrize("method", ["Reserve", "Adopt"])
async def test_another_routers_name_is_refused(method: str) -> None:
    """L25: a router's certificate neither reserves nor takes requests over for another router."""
    hub = Hub()
    request = {"Reserve": decode_pb2.ReserveRequest, "Adopt": decode_pb2.AdoptRequest}[method]
    call = getattr(servicer(hub), method)
    with pytest.raises(PermissionDenied, match="router-1") as refused:
        await as_router(call, request(spec=spec("router-1")))
    assert refused.value.field == "spec.router"
    with pytest.raises(InvalidArgument, match="names no router"):
        await as_router(call, request(spec=spec("router-0", "")))
    assert hub.adopted_for == []


async def test_in_its_own_name_a_router_adopts() -> None:
    hub = Hub()
    await as_router(servicer(hub).Adopt, decode_pb2.AdoptRequest(spec=spec("router-0")))
    assert hub.adopted_for == ["1" * 32]
