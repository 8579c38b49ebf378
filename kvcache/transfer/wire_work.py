"""A job on the transfer thread: what pushes and copies do alike between the first post and a quiet wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

from headrace.kvcache.transfer.agent import WireAgent, WireRequest
from headrace.kvcache.transfer.errors import EngineClosed, PeerLost, TransferError
from headrace.kvcache.transfer.staging import StagingSlot
from headrace.kvcache.transfer.wire_job import PushState, WireJob

B = TypeVar("B")
"""One wire request that is not posted yet."""
R = TypeVar("R")


class WireWork(ABC, Generic[B, R]):
    """State machine of one job. Its ``step`` is called by the transfer thread until ``job.state`` is terminal."""

    def __init__(self, job: WireJob[R], what: str, *, deadline: float) -> None:
        """`what`: the job in words."""
        self.job = job
        self._what = what
        self._deadline = deadline
        self._batches: deque[B] = deque()
        self._in_flight: list[tuple[WireRequest, StagingSlot | None]] = []
        self._error: TransferError | None = None
        self._started = 0.0

    @abstractmethod
    def _late(self) -> TransferError:
        """What the wait ends with at the deadline."""

    @abstractmethod
    def _result(self, seconds: float) -> R:
        """Of a job whose every byte is over."""

    def cut(self, error: TransferError) -> None:
        """Post nothing more; terminal with this error once what is posted is complete."""
        self._batches.clear()
        if self._error is None:
            self._error = error

    def give_up(self, error: TransferError) -> None:
        """As ``cut``, unless everything is posted already."""
        if self._batches:
            self.cut(error)

    @property
    def lost(self) -> bool:
        """The connection to the peer broke under this job."""
        return isinstance(self._error, PeerLost)

    def report(self, now: float) -> None:
        """Tell whoever waits; the last thing done with a terminal job."""
        job = self.job
        if not job.settled.done():
            if self._error is not None:
                job.settled.set_exception(self._error)
            else:
                job.settled.set_result(self._result(now - self._started))
        job.terminal.set_result(job.state)

    def report_closed(self) -> None:
        """The engine closes over a job that is on the wire: the wait ends, ``terminal`` never comes."""
        if not self.job.settled.done():
            self.job.settled.set_exception(
                EngineClosed(f"closed while the {self._what} was on the wire; end the process")
            )

    # --- for step ------------------------------------------------------------------------------------------------

    def _collect(self, agent: WireAgent) -> bool:
        """Release what is complete. True if anything was."""
        moved = False
        for entry in tuple(self._in_flight):
            request, slot = entry
            try:
                if not agent.is_complete(request):
                    continue
            except TransferError as error:
                self.cut(error)
            moved = True
            self._in_flight.remove(entry)
            self._over(agent, request, slot)
        return moved

    def _expire(self, now: float) -> bool:
        """L6: the deadline ends the wait. What is posted may still land, and keeps its memory until it has."""
        if now < self._deadline or self.job.settled.done():
            return False
        late = self._late()
        self.job.state = PushState.ABANDONED
        if self._batches:
            self.cut(late)
        self.job.settled.set_exception(self._error or late)
        return True

    def _posted(self, agent: WireAgent, request: WireRequest, slot: StagingSlot | None, *, complete: bool) -> None:
        """The first batch is on the wire, or already over."""
        self._batches.popleft()
        if complete:
            self._over(agent, request, slot)
        else:
            self._in_flight.append((request, slot))
        if not self._batches and self.job.state is PushState.POSTING:
            self.job.state = PushState.IN_FLIGHT

    def _finished(self) -> bool:
        """Nothing is left to post or to wait for; the state is terminal then."""
        if self._batches or self._in_flight:
            return False
        self.job.state = PushState.DONE if self._error is None else PushState.FAILED
        return True

    @staticmethod
    def _over(agent: WireAgent, request: WireRequest, slot: StagingSlot | None) -> None:
        agent.release(request)
        if slot is not None:
            slot.free()
