"""One attempt at a request that has room at decode: run prefill, hand events on, give everything back.

An attempt owns its reservation, its prefill run and its feed; however it ends, all three end with it (L10). Its failure
is the caller's to repeat with a higher attempt number, from the tokens that are known (services/router/course.py; L16).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc.aio

from headrace.router.balancers.conditional import computed_at_decode
from headrace.router.fleet import Amount
from headrace.services.router.booking import Bookings, Reservation
from headrace.services.router.errands import RELEASE_TIMEOUT_S, leave, recall
from headrace.services.router.follow import follow
from headrace.services.router.images import EncodedImages
from headrace.services.router.place import Placed, fill_spec
from headrace.services.router.prefixes import Prefixes
from headrace.services.router.workers import Workers
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import (
    HeadraceError,
    Internal,
    Unavailable,
    closed_is_unavailable,
    from_proto,
    from_rpc_error,
    told_by_peer,
)
from headrace.services.runtime.intercept import request_metadata
from headrace.v1 import common_pb2, decode_pb2, prefill_pb2

_log = logs.get(__name__)
HANDED_OVER_GRACE_S = 1.0
"""Longest wait for prefill's hand-over message after decode has reported the request's end."""


class Attempts:
    """Carries attempts out; shared by all requests of the router."""

    def __init__(self, workers: Workers, prefixes: Prefixes, clock: Clock) -> None:
        self._workers = workers
        self._prefixes = prefixes
        self._clock = clock
        self._bookings = Bookings(workers.fleet, clock)

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
        complete = False
        try:
            async with aclosing(follow(self._workers, feed, placed, deadline, self._clock)) as way:
                async for events in way:
                    complete = events.HasField("report")
                    if complete and run is not None and not run.done():
                        # Prefill's own end may come a moment later, when the answer was short; it has the figures.
                        await asyncio.wait({run}, timeout=HANDED_OVER_GRACE_S)
                    yield events
        finally:
            # All before anything waits: a failed write may bring us here, and the call's cancellation come on top.
            if call is not None and run is not None and not run.done():
                self._workers.spawn(self._leave(call, run, reservation))
            link.close(feed, None if complete else common_pb2.FINISH_REASON_CANCELLED)
            self._bookings.end(pair, feed.attempt)
            self._workers.on_news()

    def abandon(self, reservation: Reservation) -> None:
        """Give a reservation back whose events nobody began to follow. Prefill was never called."""
        if reservation.begun:
            return
        reservation.begun = True
        reservation.link.close(reservation.feed, common_pb2.FINISH_REASON_CANCELLED)
        self._bookings.end(reservation.pair, reservation.feed.attempt, Amount())
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
        pair, worked = reservation.pair, None
        rank = pair.prefill.id

        def left() -> None:
            reservation.prefill_gone = True
            self._workers.spawn(self._recall(reservation))

        try:
            with closed_is_unavailable(f"prefill replica {rank.replica_id}", left):
                async for response in call:
                    if response.HasField("handed_over"):
                        reservation.prefill = response.handed_over.report
                        reservation.handed_over = True
                        reservation.transfer_us = response.handed_over.transfer_us
                        worked = self._workers.balance.worked(pair.prediction, reservation.prefill)
                        self._prefixes.used(reservation.expectation, reservation.prefill)
                        return
                    if response.HasField("failed"):
                        reservation.target_lost = response.failed.target_lost
                        raise from_proto(response.failed.error)
            raise Internal("prefill ended its stream without a result")
        except grpc.aio.AioRpcError as error:
            typed = from_rpc_error(error)
            if isinstance(typed, Unavailable) and not told_by_peer(error):
                left()
            elif isinstance(typed, Unavailable) or not told_by_peer(error):
                # As a stream that was reset, or a message too large for prefill: it may not have arrived.
                self._workers.spawn(self._recall(reservation))
            raise typed from error
        finally:
            call.cancel()
            self._prefixes.drop(reservation.expectation)
            self._bookings.end_prefill(pair, reservation.feed.attempt, worked)

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
        with closed_is_unavailable(f"decode replica {worker.replica.id}"):
            await worker.decode.EndTransfer(
                decode_pb2.EndTransferRequest(
                    landing=reservation.response.landing,
                    sender=reservation.sender,
                    outcome=decode_pb2.TRANSFER_OUTCOME_QUIET,
                ),
                timeout=RELEASE_TIMEOUT_S,
            )


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
