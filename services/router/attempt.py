"""One attempt at a request: reserve at decode, run at prefill, hand events on, give everything back.

An attempt owns its reservation, its prefill run and its feed; however it ends, all three end with it (L10). Its failure
is the caller's to repeat with a higher attempt number, from the tokens that are known (services/router/course.py; L16).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from itertools import islice

import grpc.aio

from headrace.router.balancers.base import Pair, PairBalancer
from headrace.router.balancers.conditional import Conditional, computed_at_decode
from headrace.router.fleet import Amount, Fleet
from headrace.router.index.base import PrefixMatch
from headrace.router.request import RoutingRequest
from headrace.router.topology import RankId, Role
from headrace.services.router.attach import DecodeLink, Feed
from headrace.services.router.cache_feed import Expectation
from headrace.services.router.errands import RELEASE_TIMEOUT_S, give_back, leave, recall, release
from headrace.services.router.images import EncodedImages, retry_elsewhere
from headrace.services.router.place import Placed
from headrace.services.router.prefixes import Prefixes
from headrace.services.router.workers import Worker, Workers
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import (
    DeadlineExceeded,
    HeadraceError,
    Internal,
    NeverFits,
    ResourceExhausted,
    Unavailable,
    closed_is_unavailable,
    from_proto,
    from_rpc_error,
    told_by_peer,
)
from headrace.services.runtime.intercept import request_metadata
from headrace.v1 import common_pb2, decode_pb2, prefill_pb2

_log = logs.get(__name__)
DEADLINE_GRACE_S = 1.0
"""Decode ends a request at its deadline and says so; only if it does not, this router does."""
MOST_REFUSALS = 32
"""Decode ranks that one attempt asks for room; then it waits for news of free room."""
MOST_COMPUTING = 2
"""Decode ranks that one attempt asks to compute the prompt; then it goes to prefill."""
HANDED_OVER_GRACE_S = 1.0
"""Longest wait for prefill's hand-over message after decode has reported the request's end."""


@dataclass(eq=False)
class Reservation:
    """Room at a decode rank for one attempt."""

    pair: Pair
    link: DecodeLink
    feed: Feed
    response: decode_pb2.ReserveResponse
    seconds: float
    sender: common_pb2.PeerId
    """The prefill process that may write for it."""
    sender_endpoint: str
    """Kept beside the topology, which forgets a frozen process long before that process is dead."""
    sources: tuple[prefill_pb2.PrefixSource, ...] = ()
    """Whose host memory has more of the prefix than the prefill rank."""
    expectation: Expectation | None = None
    """What prefill should find, which it may prove wrong."""
    prefill: prefill_pb2.PrefillReport = field(default_factory=prefill_pb2.PrefillReport)
    """What prefill said at the hand-over; empty before it."""
    handed_over: bool = False
    """`prefill` is there."""
    target_lost: bool = False
    """Prefill says that decode is to blame."""
    prefill_failed: bool = False
    """Prefill has ended the attempt."""
    prefill_gone: bool = False
    """It cannot be reached."""
    begun: bool = False
    """Its events are being followed: whoever does so ends it."""
    transfer_us: int = 0
    """From the last chunk's end until decode had verified all rows."""


class Attempts:
    """Makes attempts; shared by all requests of the router."""

    def __init__(
        self,
        workers: Workers,
        balancer: PairBalancer,
        conditional: Conditional,
        prefixes: Prefixes,
        clock: Clock,
        reserve_timeout_s: float,
    ) -> None:
        self._workers = workers
        self._balancer = balancer
        self._conditional = conditional
        self._prefixes = prefixes
        self._clock = clock
        self._reserve_timeout_s = reserve_timeout_s

    async def reserve(
        self, placed: Placed, attempt: int, deadline: float, failed: Collection[RankId] = ()
    ) -> Reservation:
        """Select is reserve (L23): go down the balancer's list until a decode rank accepts. Ranks that `failed` an
        earlier attempt of the request come last.

        Raises the last refusal (RESOURCE_EXHAUSTED before NEVER_FITS), Rejected by the balancer, NeverFits when no
        rank of a role is large enough, or Unavailable when there is nobody.
        """
        fleet = self._workers.fleet
        if not len(fleet.columns(Role.PREFILL)) or not len(fleet.columns(Role.DECODE)):
            raise Unavailable("no prefill or no decode replica is ready; try again shortly", retry_after_s=1.0)
        failed = {*failed, *self._workers.broken()}
        refusals: list[HeadraceError] = []
        match = await self._prefixes.match(placed.routing, deadline)
        here = self._conditional.order(placed.routing, match, self._clock.monotonic())
        for pair in islice((pair for pair in here if pair.decode.id not in failed), MOST_COMPUTING):
            try:
                return await self._reserve_at(pair, placed, match, attempt, deadline)
            except HeadraceError as error:
                if not retry_elsewhere(error):
                    raise
                _log.info("decode does not compute it", replica=pair.decode.id.replica_id, error=str(error))
        pairs = self._balancer.by_decode(placed.routing, match, self._clock.monotonic(), failed)
        for pair in islice(pairs, MOST_REFUSALS):
            try:
                return await self._reserve_at(pair, placed, match, attempt, deadline)
            except HeadraceError as error:
                if not retry_elsewhere(error):
                    raise
                _log.info("decode refused", replica=pair.decode.id.replica_id, error=str(error))
                refusals.append(error)
        if not refusals:
            raise _nobody(fleet, placed.routing)
        raise next((error for error in refusals if isinstance(error, ResourceExhausted)), refusals[-1])

    def uncached_tokens(self, routing: RoutingRequest) -> int:
        """What the rank that has most of the prompt would have to compute: an estimate, which prefill corrects."""
        best = self._prefixes.local(routing).longest()
        cached = min(best * self._workers.group().block_tokens, routing.prompt_tokens - 1)
        return routing.prompt_tokens - cached

    async def _reserve_at(
        self, pair: Pair, placed: Placed, match: PrefixMatch, attempt: int, deadline: float
    ) -> Reservation:
        worker = self._workers.worker(pair.decode.id)
        link = worker.link
        assert link is not None
        source = self._workers.worker(pair.prefill.id)
        sender = source.peer
        left = max(0.001, min(self._reserve_timeout_s, deadline - self._clock.monotonic()))
        if not link.attached.is_set():
            try:
                async with asyncio.timeout(left):
                    await link.attached.wait()
            except TimeoutError:
                raise self._late(worker, deadline) from None
        here = computed_at_decode(pair)
        request = decode_pb2.ReserveRequest(sender=None if here else sender, compute_here=here)
        fill_spec(request.spec, placed, attempt, deadline - self._clock.monotonic())
        own_id = request.spec.id
        feed = link.open(own_id)
        started = self._clock.monotonic()
        self._begin(pair, placed, own_id, started)
        stub = worker.decode
        # The call outlives the request's deadline and its client: without its answer nobody could give the grant back.
        call = stub.Reserve(request, timeout=self._reserve_timeout_s, metadata=request_metadata())
        asked = asyncio.ensure_future(call)
        try:
            with closed_is_unavailable(f"decode replica {worker.replica.id}"):
                async with asyncio.timeout(left):
                    response = await asyncio.shield(asked)
        except BaseException as error:
            link.close(feed)
            self._end(pair, own_id, Amount())
            if not isinstance(error, grpc.aio.AioRpcError):
                if not asked.cancelled():  # else the replica is gone, and its memory with it
                    self._workers.spawn(give_back(stub, asked, own_id, sender))
                if isinstance(error, TimeoutError):
                    raise self._late(worker, deadline) from None
                raise
            typed = from_rpc_error(error)
            if isinstance(typed, DeadlineExceeded):
                typed = self._late(worker, deadline)
            if typed.code not in (common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, common_pb2.ERROR_CODE_NEVER_FITS):
                # The promise may have been made although its answer did not come.
                self._workers.spawn(release(stub, own_id))
            raise typed from error
        if response.HasField("load"):
            self._workers.report(worker.replica, response.load, _load_key(own_id))
        if here:
            self._conditional.chosen(pair)
        else:
            self._balancer.chosen(placed.routing, pair, self._clock.monotonic())
        link.keep(feed)
        seconds = self._clock.monotonic() - started
        return Reservation(
            pair,
            link,
            feed,
            response,
            seconds,
            sender,
            source.replica.endpoint,
            sources=() if here else self._prefixes.sources(placed.routing, match, pair.prefill.id),
            expectation=None if here else self._prefixes.expect(placed.routing, match, pair.prefill.id),
        )

    def _late(self, worker: Worker, deadline: float) -> HeadraceError:
        """Decode has not answered: another may, while there is time."""
        if self._clock.monotonic() >= deadline:
            return DeadlineExceeded("the deadline passed before decode had promised room")
        return Unavailable(f"decode replica {worker.replica.id} does not answer")

    async def events(
        self, placed: Placed, images: EncodedImages, reservation: Reservation, attempt: int, deadline: float
    ) -> AsyncGenerator[decode_pb2.RequestEvents, None]:
        """Run prefill and hand on decode's events until its report; consumes the reservation.

        Closing the generator early cancels at both ends. Raises what ended the attempt.
        """
        link, feed, pair = reservation.link, reservation.feed, reservation.pair
        left = deadline - self._clock.monotonic()
        call = None if computed_at_decode(pair) else self._call(placed, attempt, left, images, reservation)
        reservation.begun = True  # had a replica left meanwhile, `abandon` would give everything back
        run: asyncio.Task[None] | None = None
        if call is not None:
            run = asyncio.create_task(self._prefill(call, reservation), name="prefill-run")
            run.add_done_callback(lambda ended: _tell_failure(ended, reservation))
        grace = deadline + DEADLINE_GRACE_S - self._clock.monotonic()
        passed = DeadlineExceeded("the deadline passed at the workers")
        # Prefill's failure and the deadline come through the feed, too: one wait per event and no task of its own, as
        # this loop runs once for every token event of every request.
        overdue = asyncio.get_running_loop().call_later(max(0.0, grace), feed.put, passed)
        complete = False
        try:
            while not complete:
                events = await feed.next()
                complete = events.HasField("report")
                if complete:
                    self._workers.balance.finished(events.report.usage.completion_tokens, placed.routing.choices)
                if complete and run is not None and not run.done():
                    # Prefill's own end may come a moment later, when the answer was short; it has the figures.
                    await asyncio.wait({run}, timeout=HANDED_OVER_GRACE_S)
                yield events
                feed.consume(sum(len(tokens.token_ids) for tokens in events.tokens))
        finally:
            overdue.cancel()
            # All before anything waits: a failed write may bring us here, and the call's cancellation come on top.
            if call is not None and run is not None and not run.done():
                self._workers.spawn(self._leave(call, run, reservation))
            link.close(feed, None if complete else common_pb2.FINISH_REASON_CANCELLED)
            self._end(pair, feed.attempt)
            self._workers.on_news()

    def _begin(self, pair: Pair, placed: Placed, attempt: common_pb2.AttemptId, now: float) -> None:
        """The pair's work counts from its choice on, so that a burst spreads before anybody has answered (L22)."""
        decode = Amount(tokens=placed.routing.prompt_tokens, requests=placed.routing.choices)
        self._workers.fleet.begin(pair.decode.id, _load_key(attempt), decode, now)
        if not computed_at_decode(pair):
            self._workers.fleet.begin(pair.prefill.id, _load_key(attempt), pair.prediction.amount, now)

    def _end(self, pair: Pair, attempt: common_pb2.AttemptId, prefill: Amount | None = None) -> None:
        """All of the pair's work is over. `prefill`: what of it was done, where that is known."""
        now = self._clock.monotonic()
        self._workers.fleet.end(pair.decode.id, _load_key(attempt))
        if not computed_at_decode(pair):
            self._workers.fleet.end(pair.prefill.id, _load_key(attempt), now, prefill)

    def abandon(self, reservation: Reservation) -> None:
        """Give a reservation back whose events nobody began to follow. Prefill was never called."""
        if reservation.begun:
            return
        reservation.begun = True
        reservation.link.close(reservation.feed, common_pb2.FINISH_REASON_CANCELLED)
        self._end(reservation.pair, reservation.feed.attempt, Amount())
        self._prefixes.drop(reservation.expectation)
        if not computed_at_decode(reservation.pair):
            self._workers.spawn(self._end_quietly(reservation))
        self._workers.on_news()

    async def _end_quietly(self, reservation: Reservation) -> None:
        try:
            await self._end_transfer(reservation)
        except (HeadraceError, grpc.aio.AioRpcError) as error:
            _log.info("a grant was not given back", error=str(error))

    def _call(
        self, placed: Placed, attempt: int, left_s: float, images: EncodedImages, reservation: Reservation
    ) -> grpc.aio.UnaryStreamCall[prefill_pb2.RunRequest, prefill_pb2.RunResponse]:
        worker = self._workers.worker(reservation.pair.decode.id)
        request = prefill_pb2.RunRequest(
            embeddings=[image.handle for image in images.images],
            target=prefill_pb2.DecodeTarget(
                peer=worker.peer,
                endpoint=worker.replica.endpoint,
                agent=reservation.response.agent,
                landing=reservation.response.landing,
                held_blocks=reservation.response.held_blocks,
            ),
            prefix_hint_tokens=reservation.pair.prediction.hit_tokens,
            sources=reservation.sources,
        )
        fill_spec(request.spec, placed, attempt, left_s)
        return self._workers.prefill(reservation.pair.prefill.id).Run(request, metadata=request_metadata())

    async def _prefill(
        self,
        call: grpc.aio.UnaryStreamCall[prefill_pb2.RunRequest, prefill_pb2.RunResponse],
        reservation: Reservation,
    ) -> None:
        """Follow one run to its hand-over. Cancelling closes the stream, which stops scheduling there at once (L7)."""
        rank, worked = reservation.pair.prefill.id, None

        def recall_it() -> None:
            reservation.prefill_gone = True
            self._workers.spawn(self._recall(reservation))

        try:
            with closed_is_unavailable(f"prefill replica {rank.replica_id}", recall_it):
                async for response in call:
                    if response.HasField("handed_over"):
                        reservation.prefill = response.handed_over.report
                        reservation.handed_over = True
                        reservation.transfer_us = response.handed_over.transfer_us
                        worked = self._workers.balance.worked(reservation.pair.prediction, reservation.prefill)
                        self._prefixes.used(reservation.expectation, reservation.prefill)
                        return
                    if response.HasField("failed"):
                        reservation.target_lost = response.failed.target_lost
                        raise from_proto(response.failed.error)
            raise Internal("prefill ended its stream without a result")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                recall_it()
            reservation.prefill_gone = reservation.prefill_gone and not told_by_peer(error)
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
            self._prefixes.drop(reservation.expectation)
            self._workers.fleet.end(rank, _load_key(reservation.feed.attempt), self._clock.monotonic(), worked)

    async def _leave(
        self,
        call: grpc.aio.UnaryStreamCall[prefill_pb2.RunRequest, prefill_pb2.RunResponse],
        run: asyncio.Task[None],
        reservation: Reservation,
    ) -> None:
        if not await leave(call, run):
            await self._recall(reservation)

    async def _recall(self, reservation: Reservation) -> None:
        """The call broke, and may never have arrived. If prefill says that it does not run it, and now never will,
        nobody holds the grant and decode is told so (L7). A frozen one is asked until it wakes; one that is gone is
        known to be dead by decode itself.
        """
        try:
            if await recall(self._workers, reservation.sender_endpoint, reservation.feed.attempt):
                await self._end_transfer(reservation)
        except (HeadraceError, grpc.aio.AioRpcError) as error:
            _log.info("a broken run was not recalled", error=str(error))

    async def _end_transfer(self, reservation: Reservation) -> None:
        worker = self._workers.worker(reservation.pair.decode.id)
        await worker.decode.EndTransfer(
            decode_pb2.EndTransferRequest(
                landing=reservation.response.landing,
                sender=reservation.sender,
                outcome=decode_pb2.TRANSFER_OUTCOME_QUIET,
            ),
            timeout=RELEASE_TIMEOUT_S,
        )


def fill_spec(spec: common_pb2.RequestSpec, placed: Placed, attempt: int, left_s: float) -> None:
    """The spec of one attempt, in the message that carries it: with its token ids it is large, and copied once. All but
    the number and the time is the same in all attempts (L16)."""
    spec.CopyFrom(placed.spec)
    spec.id.attempt = attempt
    spec.time_left_ms = max(1, round(left_s * 1000))


def _tell_failure(run: asyncio.Task[None], reservation: Reservation) -> None:
    """A run that failed ends its feed; one that was cancelled is being left already. Where decode has sent tokens, the
    hand-over is done, whatever became of prefill's own word of it (L15)."""
    error = None if run.cancelled() else run.exception()
    if error is None:
        return
    feed = reservation.feed
    if feed.begun:
        _log.info("prefill failed after the hand-over", error=str(error))
        return
    reservation.prefill_failed = not reservation.target_lost
    feed.put(error if isinstance(error, Exception) else Internal(f"the run ended with {error!r}"))


def _nobody(fleet: Fleet, request: RoutingRequest) -> HeadraceError:
    """Why there is no pair to ask: only where capacity is the reason, a shorter prompt helps (L12)."""
    for role in (Role.PREFILL, Role.DECODE):
        columns = fleet.columns(role)
        if not len(columns):  # since the attempt began
            return Unavailable(f"the last {role.value} replica has just left; try again shortly", retry_after_s=1.0)
        if not columns.fits(request.prompt_tokens, request.choices).any():
            return NeverFits(
                f"no {role.value} replica can hold a prompt of {request.prompt_tokens} tokens with {request.choices} "
                "choices, even when empty; shorten it"
            )
    return Unavailable(
        "no data centre has both a prefill and a decode replica that can hold the prompt, and balance.neighbours = "
        "false keeps a request in one",
        retry_after_s=1.0,
    )


def _load_key(attempt: common_pb2.AttemptId) -> str:
    return f"{attempt.request_id}#{attempt.attempt}"
