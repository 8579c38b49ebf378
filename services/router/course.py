"""The course of one admitted request: attempts until every choice has ended, each from the tokens that are known (L15).

    reserve → prefill → events ──► finished
       ▲                   │ a worker fails
       └── other workers ◄─┘ images encoded again where their encoder is gone

While nothing is known of any choice an attempt makes all of them. After that each open choice is continued by itself,
since they have got different numbers of tokens; the others stay as they ended. Attempts are bounded in number
(`requests.max_attempts`) and by the deadline.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from headrace.router.balancers.base import Rejected
from headrace.router.balancers.conditional import computed_at_decode
from headrace.router.topology import RankId, Role
from headrace.services.router.admission import Turn
from headrace.services.router.adoption import Adopted, Adoption
from headrace.services.router.attempt import Attempts
from headrace.services.router.booking import Reservation
from headrace.services.router.event_stream import EventStream
from headrace.services.router.failures import may_do_better, told
from headrace.services.router.images import EncodedImages, ImageStage
from headrace.services.router.merge import merged
from headrace.services.router.parts import Part
from headrace.services.router.place import Placed
from headrace.services.router.prepare import Prepared
from headrace.services.router.report import RequestLog
from headrace.services.router.reserve import Reserver
from headrace.services.router.settings import RequestSection
from headrace.services.router.tenants import Tenant
from headrace.services.router.workers import ModelGroup, Workers
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import HeadraceError, Internal, ResourceExhausted, Unavailable
from headrace.v1 import inference_pb2

_log = logs.get(__name__)
NONE_ADOPTED: Final[Mapping[int, Adopted]] = MappingProxyType({})
POLL_S = 0.05
"""Between two looks for a worker that may take a failed one's place."""


@dataclass(frozen=True)
class Means:
    """What all requests share."""

    limits: RequestSection
    workers: Workers
    reserver: Reserver
    attempts: Attempts
    adoption: Adoption
    images: ImageStage
    clock: Clock
    recovered: Counter[str] = field(default_factory=Counter)
    """Attempts since start that were not the first: `retried` before the first token, `continued` after it; and of
    requests that were resumed those `adopted`, the others being `regenerated`."""


class Course:
    """One request. Its parts share the images, the place in the queue and what is known of workers that failed."""

    def __init__(
        self,
        means: Means,
        prepared: Prepared,
        tenant: Tenant,
        deadline: float,
        log: RequestLog,
        turn: Turn,
        stack: AsyncExitStack,
    ) -> None:
        """`stack` holds the images' leases; it is closed when the request has ended."""
        self._means = means
        self._prepared = prepared
        self._tenant = tenant
        self._deadline = deadline
        self._log = log
        self._turn = turn
        self._stack = stack
        self._images = EncodedImages()
        self._encodings = 0
        self._encoding = asyncio.Lock()
        self._reserving = asyncio.Lock()
        """There is one place in the queue: its parts wait for room one after another."""
        self._failed: set[RankId] = set()
        """Ranks that are asked last."""
        self._gone: set[RankId] = set()
        """Of those, the ones that cannot be reached."""
        self.stream: EventStream

    async def encode(self) -> EncodedImages:
        """The request's images at an encoder; again where the one that had them is gone. Raises HeadraceError."""
        if not self._prepared.images:
            return self._images
        async with self._encoding:
            before = self._images
            if self._encodings and not before.gone.is_set():
                return before
            self._encodings += 1
            # An id of its own each time: the balancer counts work under it.
            prepared = self._prepared
            if self._encodings > 1:
                prepared = replace(prepared, request_id=f"{prepared.request_id}~{self._encodings}")
            group = self._means.workers.group()
            self._images = await self._leased(prepared, group)
            self._log.encoder(self._images)
            if self._encodings > 1 and [image.content_digest for image in before.images] != [
                image.content_digest for image in self._images.images
            ]:
                raise Internal("an encoder made other images of the same request; report it to the operator")
            return self._images

    async def _leased(self, prepared: Prepared, group: ModelGroup) -> EncodedImages:
        """A request that has begun does not end because the encoders are full for a moment: it waits like for one that
        is to take a failed one's place."""
        clock = self._means.clock
        until = min(self._deadline, clock.monotonic() + self._means.limits.recovery_seconds)
        while True:
            leased = self._means.images.leased(prepared, self._tenant.keys, group, self._deadline)
            try:
                return await self._stack.enter_async_context(leased)
            except ResourceExhausted as full:
                pause = max(POLL_S, full.retry_after_s or 0.0)
                if self._encodings == 1 or clock.monotonic() + pause > until:
                    raise
            await asyncio.sleep(pause)

    async def run(
        self, part: Part, adopted: Adopted | None = None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Events of a part until its choices have ended. `adopted`: the first attempt is under way already. Raises what
        ended it, as long as nothing of the request has reached the client."""
        while True:
            part.tries += 1
            part.attempt += 1
            self._log.attempts = max(self._log.attempts, part.tries)
            self.stream.begin(part)
            reservation: Reservation | None = None
            images = EncodedImages()
            try:
                if adopted is not None:
                    way = self._adopted(adopted, part)
                else:
                    placed = part.after(self.stream.known)
                    images = await self.encode()
                    reservation = await self._reservation(placed, part)
                    if images.gone.is_set():  # while it waited for room
                        images = await self.encode()
                    way = self._attempt(placed, images, reservation, part)
                async with aclosing(way):
                    async for response in way:
                        yield response
                return
            except HeadraceError as error:
                failure = told(error, late=self._means.clock.monotonic() >= self._deadline)
            finally:
                if reservation is not None:
                    self._means.attempts.abandon(reservation)
            _log.warning("attempt failed", attempt=part.tries, error=str(failure), known=self._known(part))
            self.stream.lost(reservation.prefill if reservation is not None and reservation.handed_over else None)
            self._blame(reservation, adopted, images)
            if not self._may_go_on(part, failure, placed=reservation is not None or adopted is not None):
                if not self.stream.started:
                    raise failure
                for response in self.stream.failed(failure, part.choices):
                    yield response
                return
            adopted = None
            self._means.recovered["continued" if self._known(part) else "retried"] += 1
            if isinstance(failure, Unavailable):
                await self._replacement(part.tries)
            if len(part.choices) > 1 and (self._known(part) or len(self.stream.open) < len(part.choices)):
                async with aclosing(self.run_singly(part)) as responses:
                    async for response in responses:
                        yield response
                return

    async def run_singly(
        self, part: Part, adopted: Mapping[int, Adopted] = NONE_ADOPTED
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Events of the open choices of a part, each continued by itself. `adopted`: those that are under way already,
        by the client's numbers. Raises as `run`."""
        singles = [self.run(part.single(choice), adopted.get(choice)) for choice in self.stream.open]
        async with aclosing(merged(singles)) as ways:
            async for response in ways:
                yield response

    # --- one attempt -------------------------------------------------------------------------------------------

    async def _reservation(self, placed: Placed, part: Part) -> Reservation:
        """Room at a decode replica. While all are full, the request waits where it stood in the queue (L6, L12)."""
        unclear: set[RankId] = set()
        async with self._reserving:
            while True:
                try:
                    reservation = await self._means.reserver.reserve(
                        placed, part.attempt, self._deadline, self._failed, unclear
                    )
                except ResourceExhausted:
                    await self._turn.again()
                    if unclear:
                        # What such a rank promises late is given back by its number, which is over with that (L16).
                        part.attempt += 1
                        self.stream.begin(part)
                        unclear.clear()
                    continue
                except Rejected as rejected:
                    self._turn.foreseen(rejected)
                self._turn.placed()
                self._log.reserved = reservation.seconds
                if not computed_at_decode(reservation.pair):
                    self._log.worked(reservation.pair.prefill, part.tries)
                self._log.worked(reservation.pair.decode, part.tries)
                return reservation

    async def _attempt(
        self, placed: Placed, images: EncodedImages, reservation: Reservation, part: Part
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        corrected = False
        events = self._means.attempts.events(placed, images, reservation, part.attempt, self._deadline)
        watch = asyncio.create_task(_tell_gone(images, reservation), name="encoder-watch") if images.images else None
        try:
            async with aclosing(events):
                async for step in events:
                    self._log.transfer_us = reservation.transfer_us
                    if not corrected and (reservation.handed_over or step.HasField("report")):
                        told = reservation.prefill if reservation.handed_over else step.report.prefill
                        images.settle()
                        self._turn.correct(told.computed_tokens)
                        corrected = True
                    if step.tokens:
                        self._turn.delivered()
                    for response in self.stream.translate(step, part):
                        yield response
        finally:
            if watch is not None:
                watch.cancel()

    async def _adopted(self, adopted: Adopted, part: Part) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        self._turn.placed()
        if adopted.candidate is not None:
            self._log.worked(adopted.candidate, part.tries)
        self.stream.adopt(adopted.states)
        events = self._means.adoption.events(adopted, part.placed, self._deadline)
        async with aclosing(events):
            async for step in events:
                for response in self.stream.translate(step, part):
                    yield response

    # --- after a failure ---------------------------------------------------------------------------------------

    def _known(self, part: Part) -> int:
        return sum(len(self.stream.known[choice]) for choice in part.choices)

    def _blame(self, reservation: Reservation | None, adopted: Adopted | None, images: EncodedImages) -> None:
        """Who is to be avoided, and what has to be made again. `images`: the attempt's; another part of the request may
        have newer ones by now."""
        if adopted is not None:
            self._failed.update(adopted.worker.ranks)
        if reservation is None:
            return
        pair = reservation.pair
        if reservation.prefill_failed:
            self._failed.add(pair.prefill.id)
        if not reservation.prefill_gone:
            self._failed.add(pair.decode.id)
        else:
            self._gone.add(pair.prefill.id)
        if images.encoder is not None and not reservation.handed_over:
            if images.gone.is_set():
                self._gone.add(images.encoder.id)
            # Whatever it was, prefill may have failed for want of the embeddings; a sound encoder has them still.
            images.gone.set()

    def _may_go_on(self, part: Part, failure: HeadraceError, *, placed: bool) -> bool:
        """Whether another attempt may do better, and there is one left, and time."""
        limits, now = self._means.limits, self._means.clock.monotonic()
        if part.tries >= limits.max_attempts or now >= self._deadline:
            return False
        return may_do_better(failure, placed=placed, fresh=part.tries == 1 and not self._known(part))

    async def _replacement(self, tries: int) -> None:
        """Wait a while for workers that can take the place of those that failed; go on without them then."""
        until = min(self._deadline, self._means.clock.monotonic() + self._means.limits.recovery_seconds)
        if tries > 1:
            await asyncio.sleep(POLL_S * 2**tries)
        while self._means.clock.monotonic() < until and not self._replaced():  # noqa: ASYNC110 - membership has none
            await asyncio.sleep(POLL_S)

    def _replaced(self) -> bool:
        """Every role has a rank that can be reached, as far as is known."""
        fleet = self._means.workers.fleet
        gone = {*self._gone, *self._means.workers.broken()}
        roles = (Role.PREFILL, Role.DECODE, *((Role.ENCODER,) if self._prepared.images else ()))
        return all(any(candidate.id not in gone for candidate in fleet.candidates(role)) for role in roles)


async def _tell_gone(images: EncodedImages, reservation: Reservation) -> None:
    """An encoder that is gone ends an attempt whose prefill may be waiting for it."""
    await images.gone.wait()
    if not reservation.handed_over and not reservation.feed.begun:
        reservation.feed.put(Unavailable("the encoder that has the images is gone"))
