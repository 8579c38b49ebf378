"""Image embeddings on their way in: landing rows, the encoder's push, verification, a tensor per image.

The landing region of embeddings belongs to the event loop's thread; the engine gets tensors of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc.aio
import torch

from headrace.engine.request import RequestKey
from headrace.kvcache.handle import Handle
from headrace.kvcache.landing import LandingRegion
from headrace.kvcache.landing_types import ChecksumMismatch, OutOfLanding, PartChecksums, PartRequest, PartTarget
from headrace.kvcache.transfer.base import TransferEngine
from headrace.kvcache.transfer.pushes import Outcome, TerminalNotice
from headrace.services.runtime import logs
from headrace.services.runtime.errors import (
    Corrupt,
    HeadraceError,
    Incompatible,
    InvalidArgument,
    ResourceExhausted,
    from_rpc_error,
)
from headrace.services.runtime.intercept import request_metadata
from headrace.services.worker.channels import Channels
from headrace.services.worker.signing import Signer
from headrace.services.worker.transfer_wire import agent_to_wire, handle_to_wire
from headrace.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc

_log = logs.get(__name__)
TRIES = 2
RETRY_AFTER_S = 0.5
RECALL_S = 300.0
"""How long an encoder is asked to take a push back; the rows wait in quarantine until then, or until it is dead."""
RECALL_ANSWER_S = 10.0
RECALL_PAUSE_S = 0.5


@dataclass(frozen=True)
class Fetched:
    """Embeddings of one request, one tensor [span length, hidden] per image."""

    tensors: tuple[torch.Tensor, ...]
    nbytes: int = 0
    seconds: float = 0.0


class EmbeddingReceiver:
    """Fetches embeddings from the encoders that hold them."""

    def __init__(
        self,
        landing: LandingRegion,
        transfer: TransferEngine,
        channels: Channels,
        peer: common_pb2.PeerId,
        model: common_pb2.ModelIdentity,
        dtype: torch.dtype,
        signer: Signer,
    ) -> None:
        self.landing = landing
        self._transfer = transfer
        self._channels = channels
        self._peer = peer
        self._model = model
        self._dtype = dtype
        self._signer = signer
        self.endpoint_of: Callable[[str], str | None] = lambda incarnation: None
        """Where the registry has an encoder; it is believed before the handle, whose word is another worker's."""
        self._recalls: set[asyncio.Task[None]] = set()
        self._agent = common_pb2.TransferAgent()
        self.announce()

    def announce(self) -> None:
        """Describe the landing memory anew, once it can be reached by stream too."""
        self._agent = agent_to_wire(self._transfer.describe(), self._peer.replica_id, self._model, self._signer)

    async def close(self) -> None:
        """Recall nothing any more."""
        for task in self._recalls:
            task.cancel()
        await asyncio.gather(*self._recalls, return_exceptions=True)

    def check(self, spans: Sequence[common_pb2.ImageSpan], handles: Sequence[encoder_pb2.EmbeddingHandle]) -> None:
        """Refuse before anything is reserved (L10). Raises InvalidArgument, Incompatible."""
        if len(spans) != len(handles):
            raise InvalidArgument(f"{len(handles)} embeddings for {len(spans)} images", field="embeddings")
        for index, (span, handle) in enumerate(zip(spans, handles, strict=True)):
            field = f"embeddings[{index}]"
            if handle.model_fingerprint != self._model.model_fingerprint:
                raise Incompatible("this embedding is of another model", field=f"{field}.model_fingerprint")
            dtype = str(self._dtype).removeprefix("torch.")
            if handle.row_bytes != self.landing.row_bytes or handle.dtype != dtype:
                raise Incompatible(
                    f"rows of {handle.row_bytes} bytes in {handle.dtype}; this worker computes with "
                    f"{self.landing.row_bytes} bytes in {dtype}: give encoder and prefill one numeric mode",
                    field=f"{field}.row_bytes",
                )
            if handle.rows != span.length:
                raise InvalidArgument(f"{handle.rows} rows for a span of {span.length}", field=f"{field}.rows")
            if not handle.endpoint or not handle.owner.incarnation:
                raise InvalidArgument("names no encoder", field=field)
            self._signer.check_embedding(handle, field)

    async def writable(self) -> int:
        """Rows that an encoder may still write."""
        rows = self.landing.integrity().rows
        return rows.open + rows.quarantined

    async def fetch(self, key: RequestKey, handles: Sequence[encoder_pb2.EmbeddingHandle], deadline: float) -> Fetched:
        """All embeddings of a request. `deadline` on the monotonic clock.

        Raises the encoder's typed errors, ResourceExhausted when landing rows are short, Corrupt.
        """
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._fetch(f"{key.request_id}/{index}", key.attempt, handle, deadline))
                for index, handle in enumerate(handles)
            ]
        tensors = tuple(task.result() for task in tasks)
        return Fetched(tensors, sum(each.nbytes for each in tensors), time.monotonic() - began)

    async def _fetch(
        self, name: str, attempt: int, handle: encoder_pb2.EmbeddingHandle, deadline: float
    ) -> torch.Tensor:
        for _ in range(TRIES):
            grant = self._grant(name, attempt, handle, deadline)
            wire = handle_to_wire(grant, self._peer.replica_id, max(0.001, deadline - time.monotonic()), self._signer)
            self._transfer.grant(grant, handle.owner.incarnation)
            answered = False
            try:
                response = await self._push(wire, handle, deadline)
                answered = True
                return self._take(grant, handle, response)
            except ChecksumMismatch:
                continue
            finally:
                self._transfer.forget(grant.transfer_id)
                # Taken rows are free already; others are given up: to quarantine, while the encoder may write them.
                self.landing.abort(name, attempt)
                if not answered:
                    task = asyncio.create_task(self._recall(wire, handle), name="recall-push")
                    self._recalls.add(task)
                    task.add_done_callback(self._recalls.discard)
        raise Corrupt(f"the embedding arrived damaged {TRIES} times; try again elsewhere")

    def _grant(self, name: str, attempt: int, handle: encoder_pb2.EmbeddingHandle, deadline: float) -> Handle:
        part = PartRequest(None, tuple(range(handle.rows)), with_slot=False)
        try:
            return self.landing.reserve(name, attempt, (part,), deadline=deadline, sender=handle.owner.incarnation)
        except OutOfLanding as error:
            raise ResourceExhausted(
                f"no room for an embedding of {handle.rows} rows: {error}", retry_after_s=RETRY_AFTER_S
            ) from error

    async def _push(
        self, landing: common_pb2.TransferHandle, handle: encoder_pb2.EmbeddingHandle, deadline: float
    ) -> encoder_pb2.PushResponse:
        request = encoder_pb2.PushRequest(handle=handle, landing=landing, receiver=self._agent)
        left = max(0.001, deadline - time.monotonic())
        async with self._channels.use(self._endpoint(handle)) as channel:
            try:
                stub = encoder_pb2_grpc.EncoderServiceStub(channel)
                return await stub.Push(request, timeout=left, metadata=request_metadata())
            except grpc.aio.AioRpcError as failure:
                raise from_rpc_error(failure) from failure

    def _take(
        self, grant: Handle, handle: encoder_pb2.EmbeddingHandle, response: encoder_pb2.PushResponse
    ) -> torch.Tensor:
        if response.transfer_id != grant.transfer_id or len(response.checksums.rows) != handle.rows:
            raise Corrupt("the encoder answered for another transfer; try again")
        self.landing.notice(grant.transfer_id, complete=True)
        rows = torch.empty((handle.rows, self.landing.row_bytes), dtype=torch.uint8)
        self.landing.take(
            grant,
            [PartChecksums(tuple(response.checksums.rows))],
            [PartTarget(tuple(range(handle.rows)))],
            rows,
        )
        return rows.view(self._dtype)

    async def _recall(self, landing: common_pb2.TransferHandle, handle: encoder_pb2.EmbeddingHandle) -> None:
        """Ask the encoder to take back a push that may not even have arrived: then nobody would ever say the last word
        of its rows (L7). One that is dead cannot be asked; its death frees them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + RECALL_S
        request = encoder_pb2.RecallRequest(owner=handle.owner, landing=landing)
        while loop.time() < until and self.landing.writable(landing.transfer_id):
            try:
                async with self._channels.use(self._endpoint(handle)) as channel:
                    stub = encoder_pb2_grpc.EncoderServiceStub(channel)
                    await stub.Recall(request, timeout=RECALL_ANSWER_S)
            except grpc.aio.AioRpcError as failure:
                _log.info("a push was not recalled yet", error=str(from_rpc_error(failure)))
                await asyncio.sleep(RECALL_PAUSE_S)
            else:
                self.landing.notice(landing.transfer_id, complete=False)
                return

    def _endpoint(self, handle: encoder_pb2.EmbeddingHandle) -> str:
        return self.endpoint_of(handle.owner.incarnation) or handle.endpoint

    def take_notices(self, notices: Iterable[TerminalNotice]) -> None:
        """Terminal notices from the wire; those of other transfers are counted as late and change nothing."""
        for notice in notices:
            self.landing.notice(notice.transfer_id, complete=notice.outcome is Outcome.OK)

    async def sender_died(self, incarnation: str) -> None:
        """An encoder is known to be dead: what it might have written is free."""
        self._transfer.sender_died(incarnation)
        self.landing.sender_died(incarnation)


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of a task group's failures the one to tell: a typed error before others."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(first_error(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in leaves if isinstance(error, HeadraceError)), leaves[0])
