"""TransferService: rows that arrive by byte stream, written into the landing rows of the grant that they name (L1, L7).

Everything is checked before a byte is written: the caller's role and name by its certificate, the handle's signature
and time, and that it is the very grant that is open here. Bytes are written on the event loop, a message at a time, so
the sender gets ahead of this process by no more than its connection's window.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from headrace.kvcache.handle import Handle, PayloadKind
from headrace.kvcache.transfer.errors import Refusal, StreamRefused
from headrace.kvcache.transfer.inbound import InboundStream, InboundStreams
from headrace.kvcache.transfer.regions import RegionRole
from headrace.services.runtime import peers
from headrace.services.runtime.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from headrace.services.worker.signing import Signer
from headrace.services.worker.transfer_wire import handle_from_wire
from headrace.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
SENDERS: Final = {
    PayloadKind.KV: frozenset({peers.PeerRole.PREFILL, peers.PeerRole.WHOLE}),
    PayloadKind.EMBEDDING: frozenset({peers.PeerRole.ENCODER}),
}
_REFUSALS: Final[dict[Refusal, type[HeadraceError]]] = {
    Refusal.ENDED: NotFound,
    Refusal.SENDER: PermissionDenied,
    Refusal.CONFLICT: FailedPrecondition,
    Refusal.METADATA_VERSION: FailedPrecondition,
    Refusal.TARGET: InvalidArgument,
    Refusal.SIZES: InvalidArgument,
}


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """Serves the landing memory of one process. Belongs to the event loop's thread."""

    def __init__(self, inbound: InboundStreams, own: common_pb2.PeerId, signer: Signer) -> None:
        self._inbound = inbound
        self._own = own
        self._signer = signer

    async def Write(
        self, request_iterator: AsyncIterator[transfer_pb2.WriteRequest], context: _Context
    ) -> transfer_pb2.WriteResponse:
        """See transfer.proto. However the stream ends, nothing is written by it afterwards."""
        if context.time_remaining() is None:
            raise InvalidArgument("needs a deadline")  # L6: gRPC ends the call at it
        messages = aiter(request_iterator)
        first = await anext(messages, None)
        if first is None or first.WhichOneof("part") != "begin":
            raise InvalidArgument("the first message begins the stream", field="begin")
        handle = self._admit(first.begin)
        try:
            stream = self._inbound.begin(handle, first.begin.sender.incarnation)
        except StreamRefused as error:
            return await self._too_late(messages, error)
        try:
            await _take(messages, stream)
        except StreamRefused as error:
            raise _typed(error) from error
        finally:
            stream.abandon()
        return transfer_pb2.WriteResponse(bytes=stream.nbytes)

    def _admit(self, begin: transfer_pb2.WriteBegin) -> Handle:
        """Who sends, and by what right (L25)."""
        peers.require_claim(begin.sender, field="begin.sender")
        if begin.landing.receiver.incarnation != self._own.incarnation:
            raise FailedPrecondition(
                "the handle is of another life of this replica; reserve again", field="begin.landing.receiver"
            )
        handle = handle_from_wire(begin.landing, "begin.landing", self._signer, fresh=True)
        caller = peers.caller()
        if caller is not None and caller.role not in SENDERS[handle.payload]:
            raise PermissionDenied(f"a certificate of role {caller.role.value} does not send {handle.payload} rows")
        return handle

    @staticmethod
    async def _too_late(
        messages: AsyncIterator[transfer_pb2.WriteRequest], error: StreamRefused
    ) -> transfer_pb2.WriteResponse:
        """The last word of a transfer that is over already is not an error."""
        if error.reason is Refusal.ENDED:
            second = await anext(messages, None)
            if second is not None and second.WhichOneof("part") == "end" and not second.end.complete:
                return transfer_pb2.WriteResponse()
        raise _typed(error) from error


async def _take(messages: AsyncIterator[transfer_pb2.WriteRequest], stream: InboundStream) -> None:
    """All of one push. Raises StreamRefused, InvalidArgument."""
    async for message in messages:
        part = message.WhichOneof("part")
        if part == "end":
            stream.end(complete=message.end.complete, nbytes=message.end.bytes)
            return
        if part != "rows":
            raise InvalidArgument("rows or the end are expected", field=part or "part")
        for piece in message.rows.pieces:
            role = RegionRole.LANDING_SLOTS if piece.slot else RegionRole.LANDING_ROWS
            stream.write(role, piece.item, piece.offset, piece.data)
    stream.finish()


def _typed(error: StreamRefused) -> HeadraceError:
    return _REFUSALS.get(error.reason, FailedPrecondition)(str(error))
