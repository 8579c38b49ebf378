"""The engine's typed errors as the wire's: what `ServiceServer` and the router translate with. Imports no torch."""

from __future__ import annotations

from typing import Final

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.text.errors import TextError
from headrace.services.runtime import errors

DEFAULT_RETRY_S: Final = 0.5

_CLASSES: Final[dict[ErrorCode, type[errors.HeadraceError]]] = {
    ErrorCode.INVALID_ARGUMENT: errors.InvalidArgument,
    ErrorCode.NEVER_FITS: errors.NeverFits,
    ErrorCode.ABORTED: errors.Aborted,
    ErrorCode.NOT_FOUND: errors.NotFound,
    ErrorCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    ErrorCode.UNAVAILABLE: errors.Unavailable,
    ErrorCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    ErrorCode.CANCELLED: errors.Cancelled,
    ErrorCode.INTERNAL: errors.Internal,
}


def from_engine(error: EngineError) -> errors.HeadraceError:
    """The typed error that a caller sees for an engine's refusal or failure."""
    if error.code is ErrorCode.RESOURCE_EXHAUSTED:
        return errors.ResourceExhausted(error.message, retry_after_s=error.retry_after_s or DEFAULT_RETRY_S)
    if error.code is ErrorCode.TOO_SLOW:
        return errors.ResourceExhausted(error.message, retry_after_s=DEFAULT_RETRY_S, field=errors.READER)
    return _CLASSES[error.code](error.message)


def translate(error: Exception) -> errors.HeadraceError | None:
    """For `ServiceServer`: typed errors of lower layers; None for what is a defect."""
    if isinstance(error, EngineError):
        return from_engine(error)
    if isinstance(error, TextError):
        return errors.InvalidArgument(str(error), field="prompt")
    return None
