"""The way of one request, top to bottom.

    prepare → wait for admission → images → place (N₀, keys) → attempts (course.py) → usage → report

A prompt without images is placed before it waits, so that the queue knows what is cached of it. A client that resumes
goes the same way; its first attempt is the orphan that decode still has, if there is one (adoption.py).

Everything held on the way is held by a `with` block or a generator here, so that leaving in any way gives it back
(L10).
Before the first event a failure is raised and becomes a gRPC status; after it, it ends the open choices with a typed
ERROR (L28).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import TypeVar

from headrace.router.admission import Ticket
from headrace.services.router.admission import AdmissionDesk, Turn
from headrace.services.router.adoption import Adoption, Found
from headrace.services.router.attempt import Attempts
from headrace.services.router.constraint import Constraints
from headrace.services.router.course import Course, Means
from headrace.services.router.event_stream import EventStream
from headrace.services.router.image_work import image_tokens
from headrace.services.router.images import ImageStage
from headrace.services.router.model import ServedModel
from headrace.services.router.parts import Part
from headrace.services.router.place import Placed, place
from headrace.services.router.prepare import Prepared, is_quick, prepare
from headrace.services.router.report import RequestLog
from headrace.services.router.reserve import Reserver
from headrace.services.router.settings import RouterSettings
from headrace.services.router.snapshots import SnapshotPlanner
from headrace.services.router.tenants import Tenant
from headrace.services.router.workers import Workers
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import DeadlineExceeded, InvalidArgument, from_proto
from headrace.services.runtime.ids import new_request_id, scoped_id
from headrace.services.runtime.live import LiveSet, Outcome, outcome_of
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
        reserver: Reserver,
        attempts: Attempts,
        adoption: Adoption,
        desk: AdmissionDesk,
        snapshots: SnapshotPlanner,
        constraints: Constraints,
        router: common_pb2.PeerId,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._model = model
        self._workers = workers
        self._reserver = reserver
        self._means = Means(settings.requests, workers, reserver, attempts, adoption, images, clock)
        self._desk = desk
        self._router = router
        self._clock = clock
        self._snapshots = snapshots
        self._constraints = constraints
        self.recovered = self._means.recovered
        self.live: LiveSet[str] = LiveSet("requests")
        """Conservation of requests (L11)."""

    async def run(
        self, request: inference_pb2.GenerateRequest, tenant: Tenant, time_remaining_s: float | None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Events of one request. Raises typed errors before the first one only."""
        log = RequestLog(arrived=self._clock.monotonic())
        with self.live.at_door():
            longest = log.arrived + self._settings.requests.timeout_seconds
            if time_remaining_s is not None:
                longest = min(longest, log.arrived + time_remaining_s)
            reading = request, self._model, self._settings.requests, tenant.traffic_class
            if is_quick(request.prompt):
                prepared = prepare(*reading)
            else:
                reader = asyncio.to_thread(prepare, *reading)
                prepared = await _before(longest, self._clock, reader, "while the prompt was read")
            tenant.check_priority(prepared.priority)
            if request.HasField("constraint"):
                work = self._constraints.complete(prepared, request)
                prepared = await _before(longest, self._clock, work, "while the constraint was read")
            prepared = self._named(prepared, tenant)
        log.prepared = self._clock.monotonic() - log.arrived
        timeout_s = prepared.timeout_s if time_remaining_s is None else min(prepared.timeout_s, time_remaining_s)
        deadline = log.arrived + timeout_s
        with self.live.within(prepared.request_id) as ending, logs.request_context(prepared.name):
            placed = None if prepared.images else self._place(prepared, (), tenant, deadline)
            async with (
                self._desk.admitted(self._ticket(prepared, placed, tenant, deadline)) as turn,
                aclosing(self._serve(prepared, placed, tenant, deadline, log, turn)) as way,
            ):
                log.queued = self._clock.monotonic() - log.arrived - log.prepared
                async for response in way:
                    if response.HasField("finished"):
                        ending.outcome = _worst(ending.outcome, response.finished)
                    yield response

    def _named(self, prepared: Prepared, tenant: Tenant) -> Prepared:
        """With an id that is the only one in this router. The client's names are its tenant's own (L25)."""
        own = scoped_id(prepared.name, tenant.keys.tag)
        if prepared.resume:
            # The lost stream may be live here still, and its client's return is what tells us that it is lost.
            own = f"{own}+{new_request_id()[:8]}"
        elif own in self.live:
            raise InvalidArgument("a request of this id is running; choose another", field="request_id")
        return replace(prepared, request_id=own)

    def _attempt_before(self, prepared: Prepared, found: Found) -> int:
        """The number before that of the first attempt (L16). A name that the client has given may have been used
        before, here or at another router, and the newest use is to win."""
        return max(found.highest_attempt, self._workers.numbers.now()) if prepared.named else 0

    def _ticket(self, prepared: Prepared, placed: Placed | None, tenant: Tenant, deadline: float) -> Ticket:
        """What it will probably cost. Images are counted before their encoder has seen them."""
        tokens = len(prepared.token_ids) + sum(image_tokens(image, self._model.vision) for image in prepared.images)
        if placed is not None:
            tokens = self._reserver.uncached_tokens(placed.routing)
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
        placed = place(prepared, images, self._model, group, tenant.keys, self._settings, self._router, deadline)
        placed.spec.id.request_id = scoped_id(prepared.name, tenant.keys.tag)
        for choice, received in prepared.resume:
            if received > placed.spec.stop.max_tokens:
                raise InvalidArgument(f"exceeds max_tokens {placed.spec.stop.max_tokens}", field="resume")
            placed.spec.choices[choice].received_tokens = received
        return placed

    async def _serve(
        self,
        prepared: Prepared,
        placed: Placed | None,
        tenant: Tenant,
        deadline: float,
        log: RequestLog,
        turn: Turn,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        async with AsyncExitStack() as stack:
            course = Course(self._means, prepared, tenant, deadline, log, turn, stack)
            images = await course.encode()
            if placed is None:
                placed = self._place(prepared, images.images, tenant, deadline)
            self._snapshots.plan(placed, prepared, self._workers.group().block_tokens)
            stream = course.stream = EventStream(
                placed, log, prepared.report, self._clock, name=prepared.name, received=dict(prepared.resume)
            )
            found = await self._means.adoption.find(placed) if prepared.resume else Found()
            if prepared.resume:
                self._means.recovered["adopted" if found else "regenerated"] += 1
            part = Part(placed, tuple(range(placed.routing.choices)), self._attempt_before(prepared, found))
            way = course.run_singly(part, found.singles) if found.singles else course.run(part, found.whole)
            async with aclosing(way) as responses:
                async for response in responses:
                    yield response
            for response in stream.end():
                yield response


_ORDER = (Outcome.FINISHED, Outcome.CANCELLED, Outcome.DEADLINE, Outcome.FAILED)
_OUTCOMES = {
    common_pb2.FINISH_REASON_CANCELLED: Outcome.CANCELLED,
    common_pb2.FINISH_REASON_DEADLINE: Outcome.DEADLINE,
    common_pb2.FINISH_REASON_ERROR: Outcome.FAILED,
}


def _worst(current: Outcome, finished: common_pb2.FinishedEvent) -> Outcome:
    """A request ends as its worst choice. One that goes on elsewhere, or whose client does not read, has not failed; it
    has when it ran and lost its room or its workers."""
    outcome = _OUTCOMES.get(finished.reason, Outcome.FINISHED)
    if outcome is Outcome.FAILED and outcome_of(from_proto(finished.error)) is Outcome.CANCELLED:
        outcome = Outcome.CANCELLED
    return max(current, outcome, key=_ORDER.index)


async def _before(deadline: float, clock: Clock, work: Awaitable[T], where: str) -> T:
    """Await `work` until the deadline (L6). Raises DeadlineExceeded saying where the request was."""
    try:
        # Not wait_for: in Python 3.11 it loses a cancel (the client has left) that comes with what is waited for.
        async with asyncio.timeout(max(0.001, deadline - clock.monotonic())):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(f"the deadline passed {where}") from None
