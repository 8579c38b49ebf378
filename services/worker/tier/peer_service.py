"""The lessor's side: what peers may find in, lease from, and have sent out of this worker's host tier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

from headrace.kvcache.host.leases import LeaseEnded, LeaseRefused, LeaseTable
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.transfer.base import TransferEngine
from headrace.kvcache.transfer.copies import Direction, Span
from headrace.kvcache.transfer.errors import TransferBusy, TransferError
from headrace.kvcache.transfer.wire_job import PushState
from headrace.services.runtime import peers
from headrace.services.runtime.durations import seconds
from headrace.services.runtime.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from headrace.services.worker.signing import Signer
from headrace.services.worker.tier.peer_messages import keys_from_wire, leased_to_wire
from headrace.services.worker.transfer_wire import agent_from_wire
from headrace.v1 import cache_pb2, cache_pb2_grpc

HOST_TIER = "host tier"
"""Name under which its memory is registered."""
_Context = grpc.aio.ServicerContext[Any, Any]


class CachePeerServicer(cache_pb2_grpc.CachePeerServiceServicer):
    """CachePeerService."""

    def __init__(self, tier: HostTier, leases: LeaseTable, transfer: TransferEngine, signer: Signer) -> None:
        self._signer = signer
        self._tier = tier
        self._leases = leases
        self._transfer = transfer

    async def Lookup(self, request: cache_pb2.LookupRequest, context: _Context) -> cache_pb2.LookupResponse:
        return cache_pb2.LookupResponse(there=self._tier.lookup(keys_from_wire(request.keys), float("inf")))

    async def Lease(self, request: cache_pb2.LeaseRequest, context: _Context) -> cache_pb2.LeaseResponse:
        """Raises InvalidArgument, ResourceExhausted."""
        keys, reader = keys_from_wire(request.keys), request.reader.incarnation
        if not reader or not request.lease_ms:
            raise InvalidArgument("a lease needs a reader and a length", field="reader")
        peers.require_claim(request.reader, field="reader")
        try:
            lease = self._leases.grant(reader, keys, request.lease_ms / 1000)
        except LeaseRefused as error:
            raise ResourceExhausted(str(error), retry_after_s=0.1) from error
        if lease is None:
            return cache_pb2.LeaseResponse()
        return cache_pb2.LeaseResponse(
            lease_id=lease.id,
            lease_ms=round(lease.seconds * 1000),
            entries=[leased_to_wire(pinned) for pinned in lease.entries],
        )

    async def Send(self, request: cache_pb2.SendRequest, context: _Context) -> cache_pb2.SendResponse:
        """Errors mean that nothing was posted; once something is, the answer comes when the wire is quiet.

        Raises InvalidArgument, NotFound (the lease), FailedPrecondition (the reader cannot be reached),
        ResourceExhausted.
        """
        peers.require_claim(request.reader.owner, field="reader.owner")
        reader = agent_from_wire(request.reader, "reader", self._signer)
        try:
            lease, done = self._leases.begin_send(reader.incarnation, request.lease_id)
        except LeaseEnded as error:
            raise NotFound(str(error)) from error
        posted = False
        try:
            places = {pinned.info.key: pinned for pinned in lease.entries}
            if not request.targets or any(target.key not in places for target in request.targets):
                raise InvalidArgument("targets must name leased entries", field="targets")
            spans = [
                Span(places[target.key].offset, target.offset, places[target.key].info.length)
                for target in request.targets
            ]
            timeout_s = seconds(request.time_left_ms, "time_left_ms")
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.wrap_future(self._transfer.connect(reader))
                copy = self._transfer.copy(
                    Direction.WRITE, reader.incarnation, spans, region=HOST_TIER, timeout_s=timeout_s
                )
            except TransferBusy as error:
                raise ResourceExhausted(str(error), retry_after_s=0.1) from error
            except (TransferError, TimeoutError) as error:
                raise FailedPrecondition(f"the reader cannot be written to: {error}") from error
            posted = True
            # The pins end with the wire (L7), whether or not the caller is still there to be told.
            copy.terminal.add_done_callback(lambda _: done())
            return cache_pb2.SendResponse(complete=await _state(copy.terminal.add_done_callback) is PushState.DONE)
        finally:
            if not posted:
                done()

    async def Release(self, request: cache_pb2.ReleaseRequest, context: _Context) -> cache_pb2.ReleaseResponse:
        peers.require_claim(request.reader, field="reader")
        self._leases.release(request.reader.incarnation, request.lease_id)
        return cache_pb2.ReleaseResponse()


async def _state(when_done: Callable[[Callable[[Any], None]], None]) -> PushState:
    """The end of a copy; a caller that leaves does not cancel the future that others wait for."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[PushState] = loop.create_future()

    def tell(terminal: Any) -> None:
        def on_loop() -> None:
            if not ended.done():
                ended.set_result(terminal.result())

        if not loop.is_closed():
            loop.call_soon_threadsafe(on_loop)

    when_done(tell)
    return await ended
