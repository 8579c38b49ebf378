"""A request whose router is lost, found at decode and gone on with: resume by the client (spec/protocol.md, L15).

Decode keeps such an orphan for a while. Every decode replica is asked, since nobody else knows where it ran; whatever
they answer, earlier attempts are their former router's no more, so the attempt that follows is the only one (L16).
A request of several choices may have been cut up by a failure before (course.py): its choices are found one by one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc.aio

from headrace.router.fleet import Amount
from headrace.router.topology import Candidate
from headrace.services.router.attach import Feed
from headrace.services.router.errands import release
from headrace.services.router.follow import follow
from headrace.services.router.place import Placed
from headrace.services.router.workers import Worker, Workers
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import (
    HeadraceError,
    Unavailable,
    closed_is_unavailable,
    typed,
)
from headrace.services.runtime.ids import new_request_id
from headrace.services.runtime.intercept import request_metadata
from headrace.v1 import common_pb2, decode_pb2

_log = logs.get(__name__)


@dataclass(frozen=True, eq=False)
class Adopted:
    """An attempt that decode runs, or ran, and that is this router's now."""

    worker: Worker
    candidate: Candidate | None
    """None: a replica that takes no new work."""
    id: common_pb2.AttemptId
    states: tuple[common_pb2.ChoiceState, ...]
    """What the client has, by its number of each choice."""
    received: tuple[int, ...]
    """How many tokens of that are of this attempt, by the attempt's own numbers."""


@dataclass(frozen=True)
class Found:
    """What is left of a lost request: all of it, some of its choices, or nothing."""

    whole: Adopted | None = None
    singles: Mapping[int, Adopted] = field(default_factory=dict)
    """By the client's number of the choice; empty where there is a whole."""
    highest_attempt: int = 0
    """That anybody remembers; 0: none."""

    def __bool__(self) -> bool:
        return self.whole is not None or bool(self.singles)


class Adoption:
    """Asks for orphans; shared by all requests of the router."""

    def __init__(self, workers: Workers, router: common_pb2.PeerId, clock: Clock, timeout_s: float) -> None:
        """`timeout_s`: longest wait for one replica's answer."""
        self._workers = workers
        self._router = router
        self._clock = clock
        self._timeout_s = timeout_s

    async def find(self, placed: Placed) -> Found:
        """The request's newest attempt, if a decode replica can go on with it, else the newest at each of its choices.
        `placed` names what the client has of each choice; streams of this router that have the request end."""
        for worker in self._workers.all():
            if worker.link is not None:
                worker.link.detach(placed.spec.id.request_id)
        asked = [worker for worker in self._workers.all() if worker.link is not None]
        answers = await asyncio.gather(*(self._ask(worker, placed) for worker in asked))
        wholes: list[Adopted] = []
        singles: dict[int, list[Adopted]] = {}
        for worker, answer in zip(asked, answers, strict=True):
            if answer.HasField("id"):
                wholes.append(self._adopted(worker, answer.id, answer.choices, answer.received_tokens))
            for single in answer.single:
                one = self._adopted(worker, single.id, [single.state], [single.received_tokens])
                singles.setdefault(single.state.choice, []).append(one)
        whole = _newest(wholes)
        best = {} if whole is not None else {choice: _newest(found) for choice, found in singles.items()}
        kept = {choice: one for choice, one in best.items() if one is not None}
        for one in (*wholes, *itertools.chain.from_iterable(singles.values())):
            if one is not whole and one not in kept.values():
                self._workers.spawn(release(one.worker.decode, one.id))
        return Found(whole, kept, max((answer.highest_attempt for answer in answers), default=0))

    def _adopted(
        self,
        worker: Worker,
        attempt: common_pb2.AttemptId,
        states: Iterable[common_pb2.ChoiceState],
        received: Iterable[int],
    ) -> Adopted:
        known = self._workers.fleet.known(worker.ranks[0])
        return Adopted(worker, None if known is None else known[1], attempt, tuple(states), tuple(received))

    async def _ask(self, worker: Worker, placed: Placed) -> decode_pb2.AdoptResponse:
        """A replica that does not answer has nothing: what it may have is overtaken by the next attempt's number."""
        try:
            with closed_is_unavailable(f"decode replica {worker.replica.id}"):
                return await worker.decode.Adopt(
                    decode_pb2.AdoptRequest(spec=placed.spec), timeout=self._timeout_s, metadata=request_metadata()
                )
        except (HeadraceError, grpc.aio.AioRpcError) as failure:
            _log.info("an orphan could not be asked for", replica=worker.replica.id, error=str(typed(failure)))
            return decode_pb2.AdoptResponse()

    async def events(
        self, adopted: Adopted, placed: Placed, deadline: float
    ) -> AsyncGenerator[decode_pb2.RequestEvents, None]:
        """Decode's events after what the client has, until the report. Closing the generator early cancels the request.
        Raises what ended the attempt."""
        link = adopted.worker.link
        assert link is not None
        feed: Feed = link.open(adopted.id, adopted.received)
        key, rank = f"adopted {new_request_id()}", adopted.worker.ranks[0]
        amount = Amount(tokens=placed.routing.prompt_tokens, requests=placed.routing.choices)
        self._workers.fleet.begin(rank, key, amount, self._clock.monotonic())
        complete = False
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await link.attached.wait()
            except TimeoutError:
                raise Unavailable("the decode replica that has the request does not answer") from None
            link.keep(feed)
            async with aclosing(follow(self._workers, feed, placed, deadline, self._clock)) as way:
                async for events in way:
                    complete = events.HasField("report")
                    yield events
        finally:
            link.close(feed, None if complete else common_pb2.FINISH_REASON_CANCELLED)
            self._workers.fleet.end(rank, key)
            self._workers.on_news()


def _newest(found: Sequence[Adopted]) -> Adopted | None:
    return max(found, key=lambda one: one.id.attempt, default=None)
