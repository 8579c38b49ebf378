"""What is put on the wire, as whoever asked for it sees it: an end of the wait, and later a quiet wire."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from enum import StrEnum
from typing import Generic, TypeVar

R = TypeVar("R")


class PushState(StrEnum):
    """Where a push or copy stands. DONE and FAILED are terminal: nothing of it is on the wire or will be."""

    POSTING = "posting"
    """Queued, or some batches not yet posted."""
    IN_FLIGHT = "in_flight"
    """All posted, not all complete."""
    ABANDONED = "abandoned"
    """Its deadline passed: nobody waits, nothing new is posted, what was posted may still land. Not terminal."""
    DONE = "done"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in (PushState.DONE, PushState.FAILED)


class WireJob(Generic[R]):
    """Await it (or call ``wait``) for the result or the typed failure. ``settled`` ends the wait, ``terminal`` says
    that the wire is quiet: until then the memory it reads or goes into is in use (L7), whatever the wait ended with."""

    def __init__(self) -> None:
        self.state = PushState.POSTING
        self.settled: Future[R] = Future()
        """Result, or a deadline | PeerLost | WireFailed | EngineClosed: whichever comes first."""
        self.terminal: Future[PushState] = Future()
        """DONE or FAILED. Callbacks run on the transfer thread: keep them short."""
        # A caller that stops waiting must not cancel what is on the wire.
        self.settled.set_running_or_notify_cancel()
        self.terminal.set_running_or_notify_cancel()

    def wait(self, timeout_s: float | None = None) -> R:
        """Block for the result; the job's own deadline bounds the wait. Not for asyncio code."""
        return self.settled.result(timeout_s)

    def __await__(self) -> Generator[object, None, R]:
        return asyncio.wrap_future(self.settled).__await__()
