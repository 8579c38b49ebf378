"""Reservations that the engine refuses leave nothing at decode, whether or not the router waits for the answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.messages import Reserve
from headrace.engine.request import RequestKey
from headrace.kvcache.transfer.base import PeerDescription
from headrace.services.decode import service
from headrace.services.decode.attach import AttachHub
from headrace.services.decode.journals import Journals
from headrace.services.runtime.clock import ManualClock
from headrace.services.worker.signing import UNSIGNED
from headrace.services.worker.waits import waiting_for
from headrace.v1 import common_pb2, decode_pb2

PEER = common_pb2.PeerId(replica_id="decode-0", incarnation="0" * 31 + "1")


class Link:
    """An engine in the middle of a long step: what it is asked waits."""

    def __init__(self) -> None:
        self.reserving: Future[Any] = Future()
        self.asked = asyncio.Event()

    def ask(self, command: object) -> asyncio.Future[Any]:
        if isinstance(command, Reserve):
            self.asked.set()
            return waiting_for(self.reserving)
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("left", [True, False])
async def test_what_is_refused_is_forgotten(monkeypatch: pytest.MonkeyPatch, *, left: bool) -> None:
    """L10, L19: a router that gave up waiting hears no refusal, and a drain must not wait for that request for ever."""
    wanted: Any = SimpleNamespace(key=RequestKey("r", 1), delivered_to=lambda choice: ())

    compiling = asyncio.Event()

    async def compiled(bare: Any, grammars: object) -> Any:
        await compiling.wait()
        return bare

    monkeypatch.setattr(service, "engine_request", lambda *_, **__: wanted)
    monkeypatch.setattr(service, "with_grammar", compiled)
    link, clock, unused = Link(), ManualClock(), SimpleNamespace(refresh=lambda: None)
    hub = AttachHub(PEER, lambda token: b"", clock, Journals(linger_s=5.0, orphan_s=10.0, lease_s=3.0))
    described = PeerDescription(PEER.incarnation, 0, "0.x", b"", 1, (), None, b"M" * 32)
    parts: list[Any] = [SimpleNamespace(wire=common_pb2.ModelIdentity), None, PEER]
    parts += [SimpleNamespace(describe=lambda: described), link, hub, unused, clock, 16, UNSIGNED]
    spec = common_pb2.RequestSpec(
        id=common_pb2.AttemptId(request_id="r", attempt=1),
        router=common_pb2.PeerId(replica_id="router-0", incarnation="1" * 32),
        choices=[common_pb2.ChoiceState()],
    )
    served = service.DecodeServicer(*parts)
    call: Any = served.Reserve(decode_pb2.ReserveRequest(spec=spec), None)  # type: ignore[arg-type]
    reserving = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    assert (hub.open, served.reserving) == (0, 1), "a drain, and a change of role with its memory, waits for it too"
    compiling.set()
    await link.asked.wait()
    assert hub.open == 1
    if left:
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving
        assert hub.open == 1  # the engine may promise room yet
    link.reserving.set_exception(EngineError(ErrorCode.RESOURCE_EXHAUSTED, "the pool has no room"))
    if not left:
        with pytest.raises(EngineError, match="no room"):
            await reserving
    for _ in range(3):
        await asyncio.sleep(0)
    assert (hub.open, served.reserving) == (0, 0)
