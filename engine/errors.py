"""Typed errors of the engine. Each says what to do next; services map `code` to gRPC in one table."""

from __future__ import annotations

import enum


class ErrorCode(enum.Enum):
    """Kinds of failure, named after the gRPC status the service tables give them."""

    INVALID_ARGUMENT = "invalid_argument"
    """The request can never be served as written."""
    NEVER_FITS = "never_fits"
    """The request needs more than this worker has even when empty; a larger one may serve it."""
    RESOURCE_EXHAUSTED = "resource_exhausted"
    """Overload: the same request may be sent again after a delay (L12)."""
    TOO_SLOW = "too_slow"
    """The client has not taken for too long what was made for it; it may ask anew."""
    ABORTED = "aborted"
    """A higher attempt of the same request exists (L16)."""
    NOT_FOUND = "not_found"
    """No such request, reservation or pin here."""
    FAILED_PRECONDITION = "failed_precondition"
    """The command does not fit the state of what it names."""
    UNAVAILABLE = "unavailable"
    """This worker cannot go on with the request; another attempt elsewhere can."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"
    """A fault of this worker; the request ended, the worker lives (L13)."""


class EngineError(Exception):
    """A refusal or a failure of one request. `retry_after_s` is set for overload only."""

    def __init__(self, code: ErrorCode, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        """Travels whole between processes of one program (bench/gpu); the wire has its own form."""
        return _rebuilt, (self.code, self.message, self.retry_after_s)

    @property
    def retryable(self) -> bool:
        """Whether a new attempt, here later or elsewhere now, may succeed."""
        return self.code in (ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL)


def _rebuilt(code: ErrorCode, message: str, retry_after_s: float | None) -> EngineError:
    return EngineError(code, message, retry_after_s=retry_after_s)


def invalid(message: str) -> EngineError:
    """The request can never be served as written; `message` names the field and its limit."""
    return EngineError(ErrorCode.INVALID_ARGUMENT, message)


def overloaded(message: str, retry_after_s: float) -> EngineError:
    """Not now: queues or memory are full."""
    return EngineError(ErrorCode.RESOURCE_EXHAUSTED, message, retry_after_s=retry_after_s)
