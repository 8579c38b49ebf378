"""What the failure of an attempt means: for the client who is told of it, and for whether another attempt is begun."""

from __future__ import annotations

from headrace.services.router.attach import Overtaken
from headrace.services.router.images import retry_elsewhere
from headrace.services.runtime.errors import (
    READER,
    Aborted,
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    NeverFits,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)


def told(failure: HeadraceError, *, late: bool) -> HeadraceError:
    """What the client is told of it. `late`: the deadline has passed, and workers end the request each in its own
    words, as that the other one has no reservation any more."""
    if isinstance(failure, PermissionDenied | Unauthenticated):
        # Of one process towards another: nothing that the client could change.
        return _for(failure, "workers of the cluster refuse one another; the router's log says why, repeat later")
    if late and not isinstance(failure, Overtaken | DeadlineExceeded):
        passed = DeadlineExceeded("the deadline passed at the workers")
        passed.__cause__ = failure
        return passed
    if isinstance(failure, Cancelled):
        # A client that leaves cancels its task. So a worker was told by another one, which has given up its part:
        # decode calls a run back when the reservation has ended, as it does while this router stands still.
        return _for(failure, f"a worker ended the attempt: {failure.message}")
    return failure


def may_do_better(failure: HeadraceError, *, placed: bool, fresh: bool) -> bool:
    """Whether another attempt may do better. A newer attempt elsewhere is the end of this one (L16). `placed`: decode
    had promised room; `fresh`: it was the first, and nothing of the request is known."""
    if isinstance(failure, Overtaken) or (isinstance(failure, ResourceExhausted) and failure.field == READER):
        return False
    if placed:
        return retry_elsewhere(failure)
    if fresh:
        # An id that was used before: the number of this attempt may be too low.
        return isinstance(failure, Aborted)
    # Of a newer attempt, of a queue that has waited long enough, of sizes: none of these changes by trying again.
    return retry_elsewhere(failure) and not isinstance(failure, Aborted | ResourceExhausted | NeverFits)


def _for(failure: HeadraceError, message: str) -> Unavailable:
    error = Unavailable(message)
    error.__cause__ = failure
    return error
