"""The sending end of byte streams: TransferService.Write at the receiver's own port, under its certificates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.kvcache.handle import Handle
from headrace.kvcache.transfer.base import PeerDescription
from headrace.kvcache.transfer.errors import PeerLost, TransferError, WireFailed
from headrace.kvcache.transfer.regions import RegionRole
from headrace.kvcache.transfer.row_wire import OutboundStream, RowPiece, RowWire
from headrace.services.runtime.errors import HeadraceError, Unavailable, from_rpc_error, task_is_cancelled
from headrace.services.runtime.intercept import request_metadata
from headrace.services.worker.channels import Channels
from headrace.services.worker.signing import Signer
from headrace.services.worker.transfer_wire import handle_to_wire
from headrace.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc

MESSAGE_BYTES: Final = 1 << 20
WRITE_FAILED: Final = (grpc.StatusCode.INTERNAL, "Internal error from Core")
"""What gRPC says of a call whose write failed, until the call's own status has come."""
STATUS_TRIES: Final = 20
STATUS_WAIT_S: Final = 0.01


class GrpcRowWire(RowWire):
    """Streams of one process. The channel checks that the receiver is of this cluster, the receiver who sends."""

    def __init__(
        self, sender: common_pb2.PeerId, channels: Channels, signer: Signer, max_message_bytes: int = MESSAGE_BYTES
    ) -> None:
        """`max_message_bytes`: what both ends of a channel take."""
        self._message_bytes = min(MESSAGE_BYTES, max_message_bytes // 2)
        self._sender = sender
        self._channels = channels
        self._signer = signer

    @property
    def message_bytes(self) -> int:
        """See RowWire."""
        return self._message_bytes

    async def greet(self, peer: PeerDescription, timeout_s: float) -> None:
        """See RowWire."""
        async with self._channels.use(peer.listener) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                _raise(peer, error)

    def open(
        self, peer: PeerDescription, handle: Handle, timeout_s: float
    ) -> AbstractAsyncContextManager[OutboundStream]:
        """See RowWire."""
        return self._open(peer, handle, timeout_s)

    @asynccontextmanager
    async def _open(self, peer: PeerDescription, handle: Handle, timeout_s: float) -> AsyncIterator[OutboundStream]:
        landing = handle_to_wire(handle, "", timeout_s, self._signer)
        begin = transfer_pb2.WriteBegin(landing=landing, sender=self._sender)
        async with self._channels.use(peer.listener) as channel:
            stub = transfer_pb2_grpc.TransferServiceStub(channel)
            call: Any = stub.Write(timeout=timeout_s, metadata=request_metadata())
            stream = _GrpcStream(peer, call)
            try:
                await stream.send(transfer_pb2.WriteRequest(begin=begin))
                yield stream
            finally:
                if not call.done():
                    call.cancel()


class _GrpcStream(OutboundStream):
    """One call."""

    def __init__(self, peer: PeerDescription, call: Any) -> None:
        self._peer = peer
        self._call = call

    async def write(self, pieces: Sequence[RowPiece]) -> None:
        """See OutboundStream."""
        rows = transfer_pb2.WriteRows(
            pieces=[
                transfer_pb2.RowPiece(
                    slot=piece.role is RegionRole.LANDING_SLOTS, item=piece.item, offset=piece.offset, data=piece.data
                )
                for piece in pieces
            ]
        )
        await self.send(transfer_pb2.WriteRequest(rows=rows))

    async def end(self, *, complete: bool, nbytes: int) -> None:
        """See OutboundStream."""
        await self.send(transfer_pb2.WriteRequest(end=transfer_pb2.WriteEnd(complete=complete, bytes=nbytes)))

    async def close(self) -> None:
        """See OutboundStream."""
        try:
            await self._call.done_writing()
            await self._call
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            await self._failed(error)

    async def send(self, message: transfer_pb2.WriteRequest) -> None:
        """One message, once the receiver has room for it."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            await self._failed(error)

    async def _failed(self, error: BaseException) -> NoReturn:
        """The call is over; its status says why."""
        if isinstance(error, asyncio.CancelledError):
            if task_is_cancelled():
                raise error
            raise PeerLost(self._peer.incarnation, "its channel was closed") from error
        _raise(self._peer, await self._status())

    async def _status(self) -> grpc.aio.AioRpcError:
        """Of the call. A write that fails since the receiver has ended the call is told before the status is."""
        call = self._call
        for _ in range(STATUS_TRIES):
            code, details = await call.code(), await call.details()
            if (code, details) != WRITE_FAILED:
                break
            await asyncio.sleep(STATUS_WAIT_S)
        else:
            code = grpc.StatusCode.UNAVAILABLE
        metadata = await call.trailing_metadata() or grpc.aio.Metadata()
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)


def _raise(peer: PeerDescription, failure: grpc.aio.AioRpcError) -> NoReturn:
    """As the transfer engine speaks of it: a lost peer, or a refusal."""
    error: HeadraceError = from_rpc_error(failure)
    typed: TransferError
    if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise TimeoutError from failure
    if isinstance(error, Unavailable):
        typed = PeerLost(peer.incarnation, error.message)
    else:
        typed = WireFailed(f"{peer.agent_name} refuses the stream: {error}; push again under a new handle")
    raise typed from failure
