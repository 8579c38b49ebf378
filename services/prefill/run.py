"""One run, top to bottom: embeddings, engine, pushes, commit; and what it leaves behind to be cleaned up.

From the moment a Run call arrives, this process owns the grant that came with it: however the run ends, the receiver
is told that nothing more will be written (L7, L10), and pool rows stay pinned until no push reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from headrace.engine.errors import EngineError
from headrace.engine.messages import (
    Cancel,
    Event,
    FinishReason,
    HandedOver,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Progress,
    RowsReady,
    Unpin,
)
from headrace.engine.request import EngineRequest, RequestKey
from headrace.kvcache.transfer.errors import PushDeadline, TransferError
from headrace.services.prefill.commit import CommitRefused, Committer
from headrace.services.prefill.embeddings import Fetched
from headrace.services.prefill.target import HandOverTarget
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.engine_errors import from_engine
from headrace.services.runtime.errors import Cancelled, DeadlineExceeded, HeadraceError, Unavailable, to_proto
from headrace.services.worker.engine_link import EngineLink
from headrace.services.worker.events_wire import microseconds
from headrace.v1 import prefill_pb2


@dataclass
class Pins:
    """What the engine pinned for a run's pushes."""

    rows: list[int] = field(default_factory=list)
    slot: bool = False

    def note(self, event: Event) -> None:
        """Called for every event, whether or not anybody reads it any more."""
        match event:
            case RowsReady(_, rows):
                self.rows += [entry.row for entry in rows]
            case PrefillDone(tail=tail, slot=slot):
                self.rows += [tail.row] if tail is not None else []
                self.slot = self.slot or slot != 0

    def release(self, link: EngineLink, key: RequestKey) -> None:
        """No push reads them any more."""
        if self.rows or self.slot:
            link.post(Unpin(key, tuple(self.rows), self.slot))
        self.rows, self.slot = [], False


class PrefillRun:
    """A run that the engine is about to take."""

    def __init__(
        self,
        request: EngineRequest,
        target: HandOverTarget,
        committer: Committer,
        link: EngineLink,
        fetched: Fetched,
        clock: Clock,
    ) -> None:
        assert request.deadline is not None
        self.request = request
        self.pins = Pins()
        self._inbox: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.target = target
        # A push that fails while the prompt is still being computed ends the run at once.
        target.on_failed = self._inbox.put_nowait
        self._deadline = request.deadline
        self._committer = committer
        self._link = link
        self._fetched = fetched
        self._clock = clock
        self._computed_at = 0.0
        self._failed = False
        self.handed_over = False
        """Decode has the request."""

    def deliver(self, event: Event) -> None:
        """An event of the engine."""
        self.pins.note(event)
        self._inbox.put_nowait(event)

    def stop(self, error: HeadraceError) -> None:
        """End the run from outside, at whatever stage it is; its stream ends with this error."""
        self._inbox.put_nowait(error)

    # --- the way -----------------------------------------------------------------------------------------------

    async def begin(self, held_blocks: int) -> prefill_pb2.Accepted:
        """Hand the request to the engine. Raises EngineError with its refusal."""
        queued = await self._link.call(Prefill(self.request, held_blocks))
        return prefill_pb2.Accepted(queue_position=queued.position, queue_tokens=queued.tokens)

    async def follow(self) -> AsyncGenerator[prefill_pb2.RunResponse, None]:
        """Progress, then exactly one of HandedOver and Failed."""
        try:
            done: PrefillDone | None = None
            while done is None:
                events = await self._next_events()
                finished = [event for event in events if isinstance(event, RowsReady)]
                rows = [row for event in finished for row in event.rows]
                done = next((event for event in events if isinstance(event, PrefillDone)), None)
                if done is not None:
                    rows += [] if done.tail is None else [done.tail]
                    self._computed_at = self._clock.monotonic()
                # One push per step; the last carries the slot and the terminal notice.
                slot = done.slot if done is not None and done.slot else None
                # Sampling has waited for the device, so only rows of steps before the last need their mark.
                ready = finished[-1].ready if finished and done is None else None
                self.target.push(rows, self._left(), slot=slot, last=done is not None, ready=ready)
                progress = [event for event in events if isinstance(event, Progress)]
                if progress:
                    yield self._progress(progress[-1])
            handed_over = await self._hand_over(done)
            yield prefill_pb2.RunResponse(handed_over=handed_over)
        except (HeadraceError, EngineError, TransferError) as error:
            self._failed = not isinstance(error, Cancelled)
            yield prefill_pb2.RunResponse(failed=failure(error))

    async def _next_events(self) -> list[Event]:
        """All that is there, at least one. Raises the failure that ends the run. The engine ends late requests."""
        items = [await self._inbox.get()]
        while not self._inbox.empty():
            items.append(self._inbox.get_nowait())
        events: list[Event] = []
        for item in items:
            if isinstance(item, PrefillFailed):
                raise item.error
            if isinstance(item, Exception):
                raise item
            events.append(item)
        return events

    def _progress(self, event: Progress) -> prefill_pb2.RunResponse:
        progress = prefill_pb2.Progress(prompt_tokens_done=event.computed, rows_pushed=self.target.rows_pushed)
        return prefill_pb2.RunResponse(progress=progress)

    async def _hand_over(self, done: PrefillDone) -> prefill_pb2.HandedOver:
        work = asyncio.create_task(self._committer.commit(self.target, done, self._fetched, self._left()))
        ended = asyncio.create_task(self._ended_early())
        try:
            async with asyncio.timeout(self._left()):
                await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                ended.result()  # raises
            report = work.result()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed during the hand-over") from None
        finally:
            work.cancel()
            ended.cancel()
            await asyncio.gather(work, ended, return_exceptions=True)
        self.handed_over = True
        transfer_us = microseconds(self._clock.monotonic() - self._computed_at)
        # Not awaited: the engine answers between two steps, and a step of other prompts may take seconds on a CPU.
        self._link.post(HandedOver(self.request.key))
        return prefill_pb2.HandedOver(report=report, transfer_us=transfer_us)

    async def _ended_early(self) -> None:
        """Raises what `stop` gave. Push failures are told by the commit itself; the engine has had its last word."""
        while True:
            item = await self._inbox.get()
            if isinstance(item, Exception) and not isinstance(item, TransferError):
                raise item

    def _left(self) -> float:
        return max(0.001, self._deadline - self._clock.monotonic())

    # --- the end -----------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Stop scheduling at once; a no-op after a hand-over, and when the engine has ended the request itself."""
        if not self.handed_over:
            self._link.post(Cancel(self.request.key, FinishReason.ERROR if self._failed else FinishReason.CANCELLED))


def failure(error: HeadraceError | EngineError | TransferError) -> prefill_pb2.Failed:
    """The last message of a run that was accepted and not handed over."""
    if isinstance(error, CommitRefused):
        return prefill_pb2.Failed(error=to_proto(error.cause), target_lost=True)
    if isinstance(error, EngineError):
        return prefill_pb2.Failed(error=to_proto(from_engine(error)))
    if isinstance(error, PushDeadline):
        return prefill_pb2.Failed(error=to_proto(DeadlineExceeded(str(error))))
    if isinstance(error, TransferError):
        return prefill_pb2.Failed(error=to_proto(Unavailable(str(error))), target_lost=True)
    return prefill_pb2.Failed(error=to_proto(error))
