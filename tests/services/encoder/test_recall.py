"""Pushes that their receiver takes back: before they arrive, and while they may still write (L6, L7)."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any
from unittest.mock import MagicMock

import pytest

from headrace.kvcache.handle import ChecksumKind, Handle, LandingPart, PayloadKind
from headrace.kvcache.transfer.base import PeerDescription
from headrace.services.encoder.cache import EmbeddingCache, Entry
from headrace.services.encoder.service import EncoderIdentity, EncoderServicer
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.errors import FailedPrecondition, NotFound, Unavailable
from headrace.services.worker.signing import UNSIGNED
from headrace.services.worker.transfer_wire import agent_to_wire, handle_to_wire
from headrace.v1 import common_pb2, encoder_pb2

PATIENCE_S = 60.0
MODEL, RECEIVER = b"M" * 32, "1" * 32
ENCODER = common_pb2.PeerId(replica_id="encoder", incarnation="2" * 32)
CONTEXT: Any = None


class Site:
    """An encoder with one embedding that its tower has not finished, over a transfer engine that only counts."""

    def __init__(self) -> None:
        self.transfer: Any = MagicMock()
        ended: Future[None] = Future()
        ended.set_result(None)
        self.transfer.end.return_value = ended
        self.cache = EmbeddingCache(8, 16, 4, PATIENCE_S, SystemClock())
        self.entry: Entry = self.cache.find_or_begin(b"image")[0]
        self.cache.place(self.entry, 2)
        self.lease = self.cache.lease(self.entry)
        identity = EncoderIdentity(ENCODER, "", MODEL, "float32")
        unused: Any = None
        self.servicer = EncoderServicer(
            identity, self.cache, unused, self.transfer, lease_s=PATIENCE_S, max_images=1, signer=UNSIGNED
        )

    def landing(self, transfer_id: str) -> common_pb2.TransferHandle:
        handle = Handle(
            transfer_id=transfer_id,
            incarnation=RECEIVER,
            request_id="r",
            attempt=1,
            generation=1,
            layout_fingerprint=bytes(32),
            model_fingerprint=MODEL,
            parts=(LandingPart(None, (0, 1), (4, 5), None),),
            row_bytes=16,
            slot_bytes=0,
            checksum_kind=ChecksumKind.XXH3_64,
            payload=PayloadKind.EMBEDDING,
        )
        return handle_to_wire(handle, "prefill", PATIENCE_S, UNSIGNED)

    async def push(self, transfer_id: str) -> encoder_pb2.PushResponse:
        receiver = PeerDescription(RECEIVER, 0, f"0.{RECEIVER}", b"metadata", 1, (), None, MODEL)
        request = encoder_pb2.PushRequest(
            handle=encoder_pb2.EmbeddingHandle(
                owner=ENCODER, lease_id=self.lease, model_fingerprint=MODEL, rows=2, row_bytes=16
            ),
            landing=self.landing(transfer_id),
            receiver=agent_to_wire(receiver, "prefill", common_pb2.ModelIdentity(), UNSIGNED),
        )
        return await self.servicer.Push(request, CONTEXT)

    async def recall(self, transfer_id: str, owner: common_pb2.PeerId = ENCODER) -> None:
        request = encoder_pb2.RecallRequest(owner=owner, landing=self.landing(transfer_id))
        await self.servicer.Recall(request, CONTEXT)


async def test_a_push_that_arrives_after_its_recall_writes_nothing() -> None:
    """L7: its receiver was told that the rows are quiet, and may have granted them to another push since."""
    site = Site()
    await site.recall("t1")
    with pytest.raises(FailedPrecondition) as refused:
        await site.push("t1")
    assert refused.value.field == "landing"
    assert not site.transfer.method_calls


async def test_a_recall_waits_for_a_push_that_may_still_write() -> None:
    """L6, L7: it is answered once the push has said its last word, and takes no other push with it."""
    site = Site()
    pushing = asyncio.create_task(site.push("t1"))
    other = asyncio.create_task(site.push("t2"))
    await asyncio.sleep(0)
    recalling = asyncio.create_task(site.recall("t1"))
    await asyncio.sleep(0.05)
    assert not recalling.done()
    assert not pushing.done()
    site.cache.fail(site.entry, Unavailable("the tower gave up"))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Unavailable):
            await pushing
        await recalling
        with pytest.raises(Unavailable):
            await other
    assert [call.args[0].transfer_id for call in site.transfer.end.call_args_list] == ["t1", "t2"]
    with pytest.raises(FailedPrecondition):
        await site.push("t1")
    with pytest.raises(NotFound):  # the embedding is gone, the grant is good
        await site.push("t3")


async def test_a_recall_is_for_one_life_of_the_encoder() -> None:
    """L14: of another life's pushes this one knows nothing, and does not say that they are quiet."""
    site = Site()
    with pytest.raises(NotFound):
        await site.recall("t1", common_pb2.PeerId(replica_id="encoder", incarnation="3" * 32))
    assert not site.transfer.method_calls
