"""EncoderService: geometry at once, embeddings by transfer when prefill asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc.aio

from headrace.kvcache.transfer.base import TransferEngine
from headrace.kvcache.transfer.errors import TransferError
from headrace.kvcache.transfer.pushes import Outcome as TransferOutcome
from headrace.kvcache.transfer.pushes import RowMove
from headrace.services.encoder.cache import EmbeddingCache, Entry
from headrace.services.encoder.encode import ImageEncoder
from headrace.services.runtime import logs, peers
from headrace.services.runtime.durations import seconds
from headrace.services.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HeadraceError,
    Incompatible,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from headrace.services.runtime.live import LiveSet
from headrace.services.worker.recalled import Recalled
from headrace.services.worker.signing import Signer
from headrace.services.worker.transfer_wire import agent_from_wire, checksums_to_wire, handle_from_wire
from headrace.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_log = logs.get(__name__)
SOURCE = "embeddings"
"""Name under which the cache's memory is registered."""


@dataclass(frozen=True)
class EncoderIdentity:
    """What this encoder says of itself in every handle."""

    peer: common_pb2.PeerId
    endpoint: str
    model_fingerprint: bytes
    dtype: str
    """As torch names it."""


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Serves one cache and one tower."""

    def __init__(
        self,
        identity: EncoderIdentity,
        cache: EmbeddingCache,
        encoder: ImageEncoder,
        transfer: TransferEngine,
        *,
        lease_s: float,
        max_images: int,
        signer: Signer,
    ) -> None:
        self._identity = identity
        self._cache = cache
        self._encoder = encoder
        self._transfer = transfer
        self._lease_ms = round(lease_s * 1000)
        self._max_images = max_images
        self._signer = signer
        self._pushing: dict[str, asyncio.Future[None]] = {}
        """By transfer id, pushes that may write; done when they cannot any more."""
        self._recalled = Recalled[str]()
        """Transfer ids of pushes."""
        self.live: LiveSet[object] = LiveSet("encode requests")
        """Conservation of Encode calls (L11)."""

    def announce(self, endpoint: str) -> None:
        """Put the address at which this service is called into handles; known once the port is open."""
        self._identity = replace(self._identity, endpoint=endpoint)

    async def Encode(self, request: encoder_pb2.EncodeRequest, context: _Context) -> encoder_pb2.EncodeResponse:
        """See encoder.proto. All images or none: a failure releases what the others were given (L10)."""
        peers.require_claim(request.router, field="router")
        if request.model.model_fingerprint != self._identity.model_fingerprint:
            raise Incompatible("this encoder serves another model", field="model.model_fingerprint")
        if len(request.image_key) != 32:
            raise InvalidArgument("the image key must have 32 bytes", field="image_key")
        if not 1 <= len(request.images) <= self._max_images:
            raise InvalidArgument(
                f"{len(request.images)} images; this encoder takes 1 to {self._max_images}", field="images"
            )
        with self.live.within(object()):
            return await self._encode(request)

    async def _encode(self, request: encoder_pb2.EncodeRequest) -> encoder_pb2.EncodeResponse:
        leases: list[str] = []
        try:
            async with asyncio.timeout(seconds(request.time_left_ms, "time_left_ms")):
                asked: list[tuple[Entry, bytes, bool]] = []
                for index, image in enumerate(request.images):
                    entry, digest, cached = self._encoder.request(image, request.image_key, f"images[{index}]")
                    leases.append(self._cache.lease(entry))
                    asked.append((entry, digest, cached))
                images = [
                    await self._describe(request, index, *one, lease)
                    for index, (one, lease) in enumerate(zip(asked, leases, strict=True))
                ]
        except TimeoutError:
            self._give_back(leases)
            raise DeadlineExceeded("the deadline passed before the images were read") from None
        except BaseException:
            self._give_back(leases)
            raise
        return encoder_pb2.EncodeResponse(images=images, lease_ms=self._lease_ms)

    def _give_back(self, leases: Sequence[str]) -> None:
        for lease in leases:
            self._cache.release(lease)

    async def _describe(
        self, request: encoder_pb2.EncodeRequest, index: int, entry: Entry, digest: bytes, cached: bool, lease: str
    ) -> encoder_pb2.EncodedImage:
        try:
            plan = await asyncio.shield(entry.planned)
        except InvalidArgument as error:
            # All who wait for the same picture hear the same failure; each by its own place in its request.
            raise InvalidArgument(error.message, field=f"images[{index}].data") from error
        return encoder_pb2.EncodedImage(
            content_digest=digest,
            grid_height=plan.rows,
            grid_width=plan.columns,
            tokens=plan.num_tokens,
            handle=self._signer.embedding(
                encoder_pb2.EmbeddingHandle(
                    owner=self._identity.peer,
                    endpoint=self._identity.endpoint,
                    id=request.id,
                    lease_id=lease,
                    model_fingerprint=self._identity.model_fingerprint,
                    rows=plan.num_tokens,
                    row_bytes=self._cache.memory.shape[1],
                    dtype=self._identity.dtype,
                )
            ),
            cached=cached,
        )

    async def Push(self, request: encoder_pb2.PushRequest, context: _Context) -> encoder_pb2.PushResponse:
        """See encoder.proto. Whatever fails, the receiver gets a terminal notice, so that its rows come free (L7)."""
        handle = handle_from_wire(request.landing, "landing", self._signer, fresh=True)
        receiver = agent_from_wire(request.receiver, "receiver", self._signer)
        if receiver.incarnation != handle.incarnation:
            raise InvalidArgument("landing and receiver are of different processes", field="receiver.owner")
        if handle.transfer_id in self._recalled:
            raise FailedPrecondition("the receiver has taken this push back; ask with a new grant", field="landing")
        ended, loop = False, asyncio.get_running_loop()
        quiet = self._pushing[handle.transfer_id] = loop.create_future()
        quiet.add_done_callback(partial(self._pushed, handle.transfer_id))
        try:
            entry = self._checked(request.handle)
            async with asyncio.timeout(request.landing.time_left_ms / 1000):
                encode_s = await asyncio.shield(entry.ready)
                await asyncio.wrap_future(self._transfer.connect(receiver))
            if len(handle.landing_rows) != len(entry.rows) or handle.row_bytes != self._cache.memory.shape[1]:
                raise InvalidArgument(
                    f"the landing has {len(handle.landing_rows)} rows of {handle.row_bytes} bytes; the embedding "
                    f"{len(entry.rows)} of {self._cache.memory.shape[1]}",
                    field="landing.parts",
                )
            self._cache.begin_push(entry)
            try:
                push = self._transfer.push(
                    handle,
                    [RowMove(SOURCE, entry.rows, handle.landing_rows)],
                    timeout_s=max(0.001, request.landing.time_left_ms / 1000),
                    last=True,
                )
            except BaseException:
                self._cache.end_push(entry)
                raise
            ended = True

            def terminal() -> None:
                self._cache.end_push(entry)
                quiet.set_result(None)

            push.terminal.add_done_callback(lambda _: loop.call_soon_threadsafe(terminal))
            result = await push
        except TimeoutError:
            raise DeadlineExceeded("the embedding was not ready in time") from None
        except TransferError as error:
            raise Unavailable(f"the embedding could not be pushed: {error}") from error
        finally:
            if not ended:
                quiet.set_result(None)
                self._transfer.end(handle, TransferOutcome.FAILED).add_done_callback(_note_lost)
        return encoder_pb2.PushResponse(
            transfer_id=handle.transfer_id,
            checksums=checksums_to_wire(result.checksums[0]),
            bytes=result.nbytes,
            transport=result.transport,
            encode_us=round(encode_s * 1e6),
        )

    async def Recall(self, request: encoder_pb2.RecallRequest, context: _Context) -> encoder_pb2.RecallResponse:
        """See encoder.proto. The caller's deadline bounds the wait for a push that is on the wire (L6)."""
        if request.owner.incarnation != self._identity.peer.incarnation:
            raise NotFound("the push was asked of another life of the encoder", field="owner")
        transfer_id = handle_from_wire(request.landing, "landing", self._signer).transfer_id
        self._recalled.add(transfer_id)
        quiet = self._pushing.get(transfer_id)
        if quiet is not None:
            await asyncio.shield(quiet)
        return encoder_pb2.RecallResponse()

    def _pushed(self, transfer_id: str, quiet: asyncio.Future[None]) -> None:
        if self._pushing.get(transfer_id) is quiet:
            del self._pushing[transfer_id]

    def _checked(self, wire: encoder_pb2.EmbeddingHandle) -> Entry:
        """L1: the handle must be one of this life of this encoder, of a lease that lives."""
        if wire.owner.incarnation != self._identity.peer.incarnation:
            raise NotFound(
                "this handle is of another life of the encoder; encode the image again", field="handle.owner"
            )
        self._signer.check_embedding(wire, "handle")
        if wire.model_fingerprint != self._identity.model_fingerprint:
            raise Incompatible("this handle is of another model", field="handle.model_fingerprint")
        entry = self._cache.leased(wire.lease_id)
        if wire.row_bytes != self._cache.memory.shape[1] or (entry.rows and wire.rows != len(entry.rows)):
            raise FailedPrecondition("the handle's sizes are not the embedding's", field="handle.rows")
        return entry

    async def Renew(
        self, request: encoder_pb2.EncoderServiceRenewRequest, context: _Context
    ) -> encoder_pb2.EncoderServiceRenewResponse:
        """See encoder.proto."""
        lost = [lease for lease in request.lease_ids if not self._cache.renew(lease)]
        return encoder_pb2.EncoderServiceRenewResponse(lease_ms=self._lease_ms, lost_lease_ids=lost)

    async def Release(
        self, request: encoder_pb2.EncoderServiceReleaseRequest, context: _Context
    ) -> encoder_pb2.EncoderServiceReleaseResponse:
        """See encoder.proto."""
        self._give_back(request.lease_ids)
        return encoder_pb2.EncoderServiceReleaseResponse()


def _note_lost(done: Any) -> None:
    error = done.exception()
    if error is not None and not isinstance(error, HeadraceError):
        _log.warning("the receiver could not be told that the transfer ended", error=str(error))
