"""The typed errors of the system and the one table that maps them to the wire, to gRPC and to HTTP.

A server raises one of these; `abort` (called by the server's interceptor) turns it into a gRPC status whose trailing
metadata carries the serialised headrace.v1.Error; a client turns the failed call back into the same class with
`from_rpc_error`. Inside streams the same message travels in the terminal event (`to_proto`, `from_proto`).

Overload (ResourceExhausted, 429) is never reported as unavailability (Unavailable, 503), nor the other way (L12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headrace.v1 import common_pb2

METADATA_KEY: Final = "headrace-error-bin"
"""Trailing metadata key under which the serialised Error travels."""
TEXT_BYTES: Final = 1024
"""Of each text in a failed call's metadata. gRPC drops answers whose metadata exceeds 8 KiB, in which a byte of the
details may take three."""


class HeadraceError(Exception):
    """Base of all typed errors. `message` is one sentence for people that ends with what to do next.

    `field` is the proto path of the offending request field or ``""``; `retry_after_s` is in seconds, None where
    repeating does not help; `replica_id` says where the error arose, or ``""``.
    """

    code: ClassVar[common_pb2.ErrorCode.ValueType] = common_pb2.ERROR_CODE_INTERNAL

    def __init__(
        self, message: str, *, field: str = "", retry_after_s: float | None = None, replica_id: str = ""
    ) -> None:
        super().__init__(message)
        if retry_after_s is not None and retry_after_s < 0:
            raise ValueError(f"retry_after_s is {retry_after_s}; it must not be negative")
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.replica_id = replica_id

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class Internal(HeadraceError):
    """A defect of the server."""


class InvalidArgument(HeadraceError):
    """The request is wrong in itself; it has to change before it is repeated."""

    code = common_pb2.ERROR_CODE_INVALID_ARGUMENT


class Unimplemented(HeadraceError):
    """The request uses a field that this server does not implement; the field is refused, never ignored."""

    code = common_pb2.ERROR_CODE_UNIMPLEMENTED

    def __init__(self, field: str, message: str = "", *, replica_id: str = "") -> None:
        super().__init__(message or "not implemented here; leave the field unset", field=field, replica_id=replica_id)


class Unauthenticated(HeadraceError):
    """No valid credential."""

    code = common_pb2.ERROR_CODE_UNAUTHENTICATED


class PermissionDenied(HeadraceError):
    """The credential does not allow this."""

    code = common_pb2.ERROR_CODE_PERMISSION_DENIED


class NotFound(HeadraceError):
    """The named model, request, reservation or handle does not exist here."""

    code = common_pb2.ERROR_CODE_NOT_FOUND


READER: Final = "reader"
"""Field of a ResourceExhausted that ended a request as its own client read too slowly: nobody else can do better."""


class ResourceExhausted(HeadraceError):
    """Overload: a bounded queue or pool is full. Always says when to try again (L12)."""

    code = common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_s: float, field: str = "", replica_id: str = "") -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s, replica_id=replica_id)


class Unavailable(HeadraceError):
    """Nobody can serve this now: no ready replica, draining, or a peer is gone."""

    code = common_pb2.ERROR_CODE_UNAVAILABLE


class DeadlineExceeded(HeadraceError):
    """The request's deadline passed."""

    code = common_pb2.ERROR_CODE_DEADLINE_EXCEEDED


class Cancelled(HeadraceError):
    """The caller cancelled the request."""

    code = common_pb2.ERROR_CODE_CANCELLED


class Aborted(HeadraceError):
    """A newer attempt of the same request exists; this one is over (L16)."""

    code = common_pb2.ERROR_CODE_ABORTED


class FailedPrecondition(HeadraceError):
    """The state that the call needs is not there."""

    code = common_pb2.ERROR_CODE_FAILED_PRECONDITION


class Incompatible(FailedPrecondition):
    """Layout or model fingerprints differ; these two sides can never exchange data (L14)."""

    code = common_pb2.ERROR_CODE_INCOMPATIBLE


class NeverFits(FailedPrecondition):
    """The request needs more than this replica has even when empty."""

    code = common_pb2.ERROR_CODE_NEVER_FITS


class Corrupt(HeadraceError):
    """Bytes did not match their checksum or handle; they were discarded (L1, L3)."""

    code = common_pb2.ERROR_CODE_CORRUPT


@dataclass(frozen=True)
class Mapped:
    """One row of the table: the exception class of a wire code, and its codes in gRPC and HTTP."""

    error: type[HeadraceError]
    status: grpc.StatusCode
    http: int


TABLE: Final[Mapping[common_pb2.ErrorCode.ValueType, Mapped]] = {
    row.error.code: row
    for row in (
        Mapped(InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT, 400),
        Mapped(Unimplemented, grpc.StatusCode.UNIMPLEMENTED, 501),
        Mapped(Unauthenticated, grpc.StatusCode.UNAUTHENTICATED, 401),
        Mapped(PermissionDenied, grpc.StatusCode.PERMISSION_DENIED, 403),
        Mapped(NotFound, grpc.StatusCode.NOT_FOUND, 404),
        Mapped(ResourceExhausted, grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        Mapped(Unavailable, grpc.StatusCode.UNAVAILABLE, 503),
        Mapped(DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, 504),
        # 499 is the common code for "client closed request"; nobody is left to read it.
        Mapped(Cancelled, grpc.StatusCode.CANCELLED, 499),
        Mapped(Aborted, grpc.StatusCode.ABORTED, 409),
        Mapped(FailedPrecondition, grpc.StatusCode.FAILED_PRECONDITION, 400),
        Mapped(Incompatible, grpc.StatusCode.FAILED_PRECONDITION, 400),
        Mapped(NeverFits, grpc.StatusCode.FAILED_PRECONDITION, 400),
        Mapped(Corrupt, grpc.StatusCode.DATA_LOSS, 500),
        Mapped(Internal, grpc.StatusCode.INTERNAL, 500),
    )
}
"""Every ErrorCode but UNSPECIFIED, exactly once (a test says so)."""

# What a bare gRPC status means when the peer sent no Error: gRPC itself raises these. RESOURCE_EXHAUSTED from gRPC's
# own code is a message over the size limit, which no waiting cures. CANCELLED is a server that shut as the call came:
# who cancels a call himself gets CancelledError. UNIMPLEMENTED is a process that serves something else at the address
# of one that is gone: a worker in its next role, or another that was given the port.
_BARE: Final[Mapping[grpc.StatusCode, type[HeadraceError]]] = {
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
    grpc.StatusCode.ALREADY_EXISTS: FailedPrecondition,
    grpc.StatusCode.UNKNOWN: Internal,
    **{row.status: row.error for row in reversed(list(TABLE.values()))},
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidArgument,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: Unavailable,
}


def to_proto(error: HeadraceError) -> common_pb2.Error:
    """The wire form of a typed error."""
    wire = common_pb2.Error(code=error.code, message=error.message, field=error.field, replica_id=error.replica_id)
    if error.retry_after_s is not None:
        wire.retry_after_ms = round(error.retry_after_s * 1000)
    return wire


def from_proto(wire: common_pb2.Error) -> HeadraceError:
    """The typed error of a wire form. A code that this version does not know becomes Internal and says so."""
    row = TABLE.get(wire.code)
    retry_after_s = wire.retry_after_ms / 1000 if wire.HasField("retry_after_ms") else None
    if row is None:
        return Internal(f"unknown error code {wire.code}: {wire.message}", replica_id=wire.replica_id)
    # Subclasses narrow their constructors for callers; the wire form has all fields already.
    error = row.error.__new__(row.error)
    HeadraceError.__init__(
        error, wire.message, field=wire.field, retry_after_s=retry_after_s, replica_id=wire.replica_id
    )
    return error


def trailing_metadata(error: HeadraceError) -> tuple[tuple[str, bytes]]:
    """Trailing metadata of a failed call; texts as short as they have to be there."""
    wire = to_proto(error)
    wire.message, wire.field = shortened(wire.message), shortened(wire.field)
    return ((METADATA_KEY, wire.SerializeToString()),)


def shortened(text: str) -> str:
    """At most TEXT_BYTES of a text, which may repeat what a caller sent."""
    data = text.encode()
    return text if len(data) <= TEXT_BYTES else data[:TEXT_BYTES].decode(errors="ignore") + "…"


async def abort(context: grpc.aio.ServicerContext[object, object], error: HeadraceError) -> NoReturn:
    """End a call with the error's gRPC status, its text as details and the Error in the trailing metadata, beside what
    stands there."""
    trailing = (*(context.trailing_metadata() or ()), *trailing_metadata(error))
    await context.abort(TABLE[error.code].status, shortened(str(error)), trailing)


def from_rpc_error(failure: grpc.aio.AioRpcError) -> HeadraceError:
    """The typed error of a failed call; from the status alone where the peer (or gRPC itself) sent no Error."""
    for key, value in failure.trailing_metadata() or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            try:
                return from_proto(common_pb2.Error.FromString(value))
            except DecodeError:
                break
    error_class = _BARE.get(failure.code(), Internal)
    error = error_class.__new__(error_class)
    HeadraceError.__init__(error, failure.details() or failure.code().name)
    return error


def typed(failure: HeadraceError | grpc.aio.AioRpcError) -> HeadraceError:
    """The typed error of a call that may have been refused before it was made."""
    return failure if isinstance(failure, HeadraceError) else from_rpc_error(failure)


def told_by_peer(failure: grpc.aio.AioRpcError) -> bool:
    """Whether the peer itself ended the call: it can be reached, whatever it said."""
    return any(key == METADATA_KEY for key, _ in failure.trailing_metadata() or ())


def grpc_status(error: HeadraceError) -> grpc.StatusCode:
    """The gRPC status of a typed error."""
    return TABLE[error.code].status


def http_status(error: HeadraceError) -> int:
    """The HTTP status of a typed error."""
    return TABLE[error.code].http


def task_is_cancelled() -> bool:
    """Whether somebody cancelled the running task. If not, a CancelledError in it came out of what it awaited."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


@contextmanager
def closed_is_unavailable(peer: str, on_closed: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Around calls to a peer. When its channel is closed, since it left, grpc.aio raises CancelledError in the caller,
    who was not cancelled, and UsageError in one that calls after that; both are Unavailable here, so that the request
    is repeated or ended, never forgotten (L6).
    `on_closed` is called first: the peer may be dead, frozen or cut off, and hold what the call gave it.
    """
    try:
        yield
    except asyncio.CancelledError:
        if task_is_cancelled():
            raise
        on_closed()
        raise Unavailable(f"{peer} left while it was called; try again", retry_after_s=1.0) from None
    except grpc.aio.UsageError:
        on_closed()
        raise Unavailable(f"{peer} left before it was called; try again", retry_after_s=1.0) from None
