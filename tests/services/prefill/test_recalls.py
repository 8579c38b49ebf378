"""Landing rows of embeddings whose encoder never says its last word come free when it is asked (L6, L7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import MagicMock

import grpc.aio
import pytest
import pytest_asyncio
import torch

from headrace.engine.request import RequestKey
from headrace.kvcache.handle import ChecksumKind, PayloadKind
from headrace.kvcache.landing import LandingRegion
from headrace.kvcache.landing_types import LandingIdentity
from headrace.services.prefill import embeddings
from headrace.services.prefill.embeddings import EmbeddingReceiver
from headrace.services.runtime.settings import RpcSettings
from headrace.services.worker.channels import Channels
from headrace.services.worker.signing import UNSIGNED
from headrace.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc

PATIENCE_S = 60.0
ROW_BYTES, ROWS = 16, 5


class FakeEncoder(encoder_pb2_grpc.EncoderServiceServicer):
    """Refuses every push without a word to its landing, and answers a recall when it may."""

    def __init__(self) -> None:
        self.recalls: list[encoder_pb2.RecallRequest] = []
        self.answers = asyncio.Event()

    async def Push(self, request: encoder_pb2.PushRequest, context: Any) -> encoder_pb2.PushResponse:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the wire broke")
        raise AssertionError

    async def Recall(self, request: encoder_pb2.RecallRequest, context: Any) -> encoder_pb2.RecallResponse:
        self.recalls.append(request)
        if not self.answers.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the wire is broken yet")
        return encoder_pb2.RecallResponse()


class Site:
    def __init__(self, encoder: FakeEncoder, receiver: EmbeddingReceiver, handle: encoder_pb2.EmbeddingHandle) -> None:
        self.encoder, self.receiver, self.handle = encoder, receiver, handle

    async def fails(self) -> None:
        """A fetch that its encoder refuses."""
        with pytest.raises(BaseExceptionGroup):
            await self.receiver.fetch(RequestKey("r", 1), [self.handle], time.monotonic() + PATIENCE_S)
        assert self.quarantined == ROWS

    @property
    def quarantined(self) -> int:
        return self.receiver.landing.integrity().rows.quarantined


@pytest_asyncio.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(embeddings, "agent_to_wire", lambda *_: common_pb2.TransferAgent())
    monkeypatch.setattr(embeddings, "RECALL_PAUSE_S", 0.01)
    encoder, server = FakeEncoder(), grpc.aio.server()
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(encoder, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    landing = LandingRegion(
        LandingIdentity("1" * 32, bytes(32), bytes(32), ChecksumKind.XXH3_64, PayloadKind.EMBEDDING),
        row_bytes=ROW_BYTES,
        slot_bytes=0,
        num_rows=2 * ROWS,
        num_slots=0,
    )
    transfer: Any = MagicMock()
    channels, peer = Channels(RpcSettings()), common_pb2.PeerId(replica_id="prefill", incarnation="1" * 32)
    receiver = EmbeddingReceiver(landing, transfer, channels, peer, common_pb2.ModelIdentity(), torch.float32, UNSIGNED)
    owner = common_pb2.PeerId(replica_id="encoder", incarnation="2" * 32)
    handle = encoder_pb2.EmbeddingHandle(owner=owner, endpoint=f"127.0.0.1:{port}", rows=ROWS, row_bytes=ROW_BYTES)
    yield Site(encoder, receiver, handle)
    await receiver.close()
    await channels.close()
    await server.stop(0)


async def until(site: Site, rows: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while site.quarantined != rows:  # noqa: ASYNC110 - the region has no event
            await asyncio.sleep(0.01)


async def test_an_encoder_is_asked_until_it_answers(site: Site) -> None:
    await site.fails()
    async with asyncio.timeout(PATIENCE_S):
        while len(site.encoder.recalls) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert site.quarantined == ROWS
    site.encoder.answers.set()
    await until(site, 0)
    assert site.encoder.recalls[0].owner == site.handle.owner
    assert site.encoder.recalls[0].landing.transfer_id


async def test_a_dead_encoder_is_asked_no_more(site: Site) -> None:
    await site.fails()
    await site.receiver.sender_died(site.handle.owner.incarnation)
    await until(site, 0)
    asked = len(site.encoder.recalls)
    await asyncio.sleep(0.2)
    assert len(site.encoder.recalls) <= asked + 1


async def test_an_encoder_is_asked_where_the_registry_has_it(site: Site) -> None:
    """A handle whose address is wrong leaves no rows behind."""
    owner = site.handle.owner.incarnation
    site.receiver.endpoint_of = {owner: site.handle.endpoint}.get
    site.handle.endpoint = "127.0.0.1:9x"
    await site.fails()
    site.encoder.answers.set()
    await until(site, 0)
