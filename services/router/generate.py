"""The way of one request, top to bottom.

    prepare → wait for admission → images → place (N₀, keys) → [reserve → prefill → events]* → usage → report

A prompt without images is placed before it waits, so that the queue knows what is cached of it.

Everything held on the way is held by a `with` block or a generator here, so that leaving in any way gives it back
(L10).
Before the first event a failure is raised and becomes a gRPC status; after it, it ends the open choices with a typed
ERROR (L28).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Collection, Sequence
from contextlib import aclosing
from typing import TypeVar

from headrace.router.admission import Ticket
from headrace.router.balancers.base import Rejected
from headrace.router.balancers.conditional import computed_at_decode
from headrace.router.topology import RankId
from headrace.services.router.admission import AdmissionDesk, Turn
from headrace.services.router.attempt import Attempts, Reservation
from headrace.services.router.event_stream import EventStream
from headrace.services.router.image_work import image_tokens
from headrace.services.router.images import EncodedImages, ImageStage, retry_elsewhere
from headrace.services.router.model import ServedModel
from headrace.services.router.place import Placed, place
from headrace.services.router.prepare import Prepared, is_quick, prepare
from headrace.services.router.report import RequestLog
from headrace.services.router.settings import RouterSettings
from headrace.services.router.snapshots import SnapshotPlanner
from headrace.services.router.tenants import Tenant
from headrace.services.router.workers import Workers
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    InvalidArgument,
    ResourceExhausted,
)
from headrace.services.runtime.live import LiveSet, Outcome
from headrace.v1 import common_pb2, encoder_pb2, inference_pb2

T = TypeVar("T")
_log = logs.get(__name__)


class Generation:
    """Serves requests for one model."""

    def __init__(
        self,
        settings: RouterSettings,
        model: ServedModel,
        workers: Workers,
        images: ImageStage,
        attempts: Attempts,
        desk: AdmissionDesk,
        snapshots: SnapshotPlanner,
        router: common_pb2.PeerId,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._model = model
        self._workers = workers
        self._images = images
        self._attempts = attempts
        self._desk = desk
        self._router = router
        self._clock = clock
        self._snapshots = snapshots
        self.live: LiveSet[str] = LiveSet("requests")
        """Conservation of requests (L11): one that was validated is accepted."""
        self.refused = 0
        """Requests refused before they were accepted."""

    async def run(
        self, request: inference_pb2.GenerateRequest, tenant: Tenant, time_remaining_s: float | None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Events of one request. Raises typed errors before the first one only."""
        log = RequestLog(arrived=self._clock.monotonic())
        try:
            longest = log.arrived + self._settings.requests.timeout_seconds
            if time_remaining_s is not None:
                longest = min(longest, log.arrived + time_remaining_s)
            reading = request, self._model, self._settings.requests, tenant.traffic_class
            if is_quick(request.prompt):
                prepared = prepare(*reading)
            else:
                work = asyncio.to_thread(prepare, *reading)
                prepared = await _before(longest, self._clock, work, "while the prompt was read")
            tenant.check_priority(prepared.priority)
            if prepared.request_id in self.live:
                raise InvalidArgument("a request of this id is running; choose another", field="request_id")
        except HeadraceError:
            self.refused += 1
            raise
        log.prepared = self._clock.monotonic() - log.arrived
        timeout_s = prepared.timeout_s if time_remaining_s is None else min(prepared.timeout_s, time_remaining_s)
        deadline = log.arrived + timeout_s
        with self.live.within(prepared.request_id) as ending, logs.request_context(prepared.request_id):
            try:
                placed = None if prepared.images else self._place(prepared, (), tenant, deadline)
                async with (
                    self._desk.admitted(self._ticket(prepared, placed, tenant, deadline)) as turn,
                    aclosing(self._serve(prepared, placed, tenant, deadline, log, turn)) as way,
                ):
                    log.queued = self._clock.monotonic() - log.arrived - log.prepared
                    async for response in way:
                        if response.HasField("finished"):
                            ending.outcome = _worst(ending.outcome, response.finished.reason)
                        yield response
            except DeadlineExceeded:
                ending.outcome = Outcome.DEADLINE
                raise
            except (GeneratorExit, Cancelled):
                ending.outcome = Outcome.CANCELLED
                raise

    def _ticket(self, prepared: Prepared, placed: Placed | None, tenant: Tenant, deadline: float) -> Ticket:
        """What it will probably cost. Images are counted before their encoder has seen them."""
        tokens = len(prepared.token_ids) + sum(image_tokens(image, self._model.vision) for image in prepared.images)
        if placed is not None:
            tokens = self._attempts.uncached_tokens(placed.routing)
        return Ticket(
            request=prepared.request_id,
            tenant=tenant.keys.tag,
            priority=prepared.priority,
            tokens=tokens,
            start_by=deadline - self._desk.fastest_s(tokens),
        )

    def _place(
        self, prepared: Prepared, images: Sequence[encoder_pb2.EncodedImage], tenant: Tenant, deadline: float
    ) -> Placed:
        group = self._workers.group()
        return place(prepared, images, self._model, group, tenant.keys, self._settings, self._router, deadline)

    async def _serve(
        self,
        prepared: Prepared,
        placed: Placed | None,
        tenant: Tenant,
        deadline: float,
        log: RequestLog,
        turn: Turn,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        group = self._workers.group()
        async with self._images.leased(prepared, tenant.keys, group, deadline) as images:
            log.encoder(images)
            if placed is None:
                placed = self._place(prepared, images.images, tenant, deadline)
            self._snapshots.plan(placed, prepared, group.block_tokens)
            stream = EventStream(placed, log, prepared.report, self._clock)
            failed: set[RankId] = set()
            while True:
                log.attempts += 1
                reservation = await self._reservation(placed, log, deadline, failed, turn)
                attempt = self._attempt(placed, images, reservation, stream, log, deadline, turn)
                try:
                    async with aclosing(attempt):
                        async for response in attempt:
                            yield response
                    return
                except HeadraceError as error:
                    _log.warning("attempt failed", attempt=log.attempts, error=str(error), started=stream.started)
                    if stream.started:
                        for response in stream.failed(error, reservation.prefill):
                            yield response
                        return
                    if log.attempts >= self._settings.requests.max_attempts or not retry_elsewhere(error):
                        raise
                    failed |= {reservation.pair.prefill.id, reservation.pair.decode.id}
                finally:
                    self._attempts.abandon(reservation)

    async def _attempt(
        self,
        placed: Placed,
        images: EncodedImages,
        reservation: Reservation,
        stream: EventStream,
        log: RequestLog,
        deadline: float,
        turn: Turn,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        corrected = False
        events = self._attempts.events(placed, images, reservation, log.attempts, deadline)
        async with aclosing(events):
            async for step in events:
                log.transfer_us = reservation.transfer_us
                if not corrected and (reservation.handed_over or step.HasField("report")):
                    told = reservation.prefill if reservation.handed_over else step.report.prefill
                    images.settle()
                    turn.correct(told.computed_tokens)
                    corrected = True
                if step.tokens:
                    turn.delivered()
                for response in stream.translate(step):
                    yield response

    async def _reservation(
        self, placed: Placed, log: RequestLog, deadline: float, failed: Collection[RankId], turn: Turn
    ) -> Reservation:
        """Room at a decode replica. While all are full, the request waits where it stood in the queue (L6, L12)."""
        while True:
            try:
                reservation = await self._attempts.reserve(placed, log.attempts, deadline, failed)
            except ResourceExhausted:
                await turn.again()
                continue
            except Rejected as rejected:
                turn.foreseen(rejected)
            turn.placed()
            log.reserved = reservation.seconds
            if not computed_at_decode(reservation.pair):
                log.worked(reservation.pair.prefill, log.attempts)
            log.worked(reservation.pair.decode, log.attempts)
            return reservation


_ORDER = (Outcome.FINISHED, Outcome.CANCELLED, Outcome.DEADLINE, Outcome.FAILED)
_OUTCOMES = {
    common_pb2.FINISH_REASON_CANCELLED: Outcome.CANCELLED,
    common_pb2.FINISH_REASON_DEADLINE: Outcome.DEADLINE,
    common_pb2.FINISH_REASON_ERROR: Outcome.FAILED,
}


def _worst(current: Outcome, reason: common_pb2.FinishReason.ValueType) -> Outcome:
    """A request ends as its worst choice."""
    return max(current, _OUTCOMES.get(reason, Outcome.FINISHED), key=_ORDER.index)


async def _before(deadline: float, clock: Clock, work: Awaitable[T], where: str) -> T:
    """Await `work` until the deadline (L6). Raises DeadlineExceeded saying where the request was."""
    try:
        # Not wait_for: in Python 3.11 it loses a cancel (the client has left) that comes with what is waited for.
        async with asyncio.timeout(max(0.001, deadline - clock.monotonic())):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(f"the deadline passed {where}") from None
