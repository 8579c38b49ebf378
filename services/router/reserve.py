"""Room at a decode rank for an attempt: select is reserve (L23)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from itertools import islice

import grpc.aio

from headrace.router.balancers.base import Pair, PairBalancer
from headrace.router.balancers.conditional import Conditional, computed_at_decode
from headrace.router.fleet import Amount, Fleet
from headrace.router.index.base import PrefixMatch
from headrace.router.request import RoutingRequest
from headrace.router.topology import RankId, Role
from headrace.services.router.booking import Bookings, Reservation, load_key
from headrace.services.router.errands import give_back, release
from headrace.services.router.images import retry_elsewhere
from headrace.services.router.place import Placed, fill_spec
from headrace.services.router.prefixes import Prefixes
from headrace.services.router.workers import Worker, Workers
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import (
    DeadlineExceeded,
    HeadraceError,
    NeverFits,
    ResourceExhausted,
    Unavailable,
    closed_is_unavailable,
    from_rpc_error,
)
from headrace.services.runtime.intercept import request_metadata
from headrace.v1 import common_pb2, decode_pb2

_log = logs.get(__name__)
MOST_REFUSALS = 32
"""Decode ranks that one attempt asks for room; then it waits for news of free room."""
MOST_COMPUTING = 2
"""Decode ranks that one attempt asks to compute the prompt; then it goes to prefill."""


class Reserver:
    """Asks decode ranks for room; shared by all requests of the router."""

    def __init__(
        self,
        workers: Workers,
        balancer: PairBalancer,
        conditional: Conditional,
        prefixes: Prefixes,
        clock: Clock,
        timeout_s: float,
        constraint_s: float = 0.0,
    ) -> None:
        """`timeout_s`: longest wait for one rank's answer; `constraint_s`: so much longer where it has a constraint to
        compile."""
        self._workers = workers
        self._balancer = balancer
        self._conditional = conditional
        self._prefixes = prefixes
        self._clock = clock
        self._timeout_s = timeout_s
        self._constraint_s = constraint_s
        self._bookings = Bookings(workers.fleet, clock)

    async def reserve(
        self,
        placed: Placed,
        attempt: int,
        deadline: float,
        failed: Collection[RankId] = (),
        unclear: set[RankId] | None = None,
    ) -> Reservation:
        """Go down the balancer's list until a decode rank accepts. Ranks that `failed` an
        earlier attempt of the request come last. Those that may have promised room unheard are added to `unclear`, and
        not asked again: what this number promised there is on its way to be given back.

        Raises a refusal (RESOURCE_EXHAUSTED before UNAVAILABLE before others: who may do it later decides), Rejected by
        the balancer, NeverFits when no rank of a role is large enough, or Unavailable when there is nobody.
        """
        fleet = self._workers.fleet
        if not len(fleet.columns(Role.PREFILL)) or not len(fleet.columns(Role.DECODE)):
            raise Unavailable("no prefill or no decode replica is ready; try again shortly", retry_after_s=1.0)
        failed = {*failed, *self._workers.broken()}
        match = await self._prefixes.match(placed.routing, deadline)
        here = self._conditional.order(placed.routing, match, self._clock.monotonic())
        unclear = set() if unclear is None else unclear
        sound = islice((pair for pair in here if pair.decode.id not in failed), MOST_COMPUTING)
        reservation, _ = await self._first(sound, placed, match, attempt, deadline, unclear)
        if reservation is not None:
            return reservation
        pairs = self._balancer.by_decode(placed.routing, match, self._clock.monotonic(), failed)
        most = islice(pairs, MOST_REFUSALS)
        reservation, refusals = await self._first(most, placed, match, attempt, deadline, unclear)
        if reservation is not None:
            return reservation
        if not refusals and unclear:
            raise Unavailable("no decode replica answers; try again shortly", retry_after_s=1.0)
        if not refusals:
            raise _nobody(fleet, placed.routing)
        passing = (error for kind in (ResourceExhausted, Unavailable) for error in refusals if isinstance(error, kind))
        raise next(passing, refusals[-1])

    def uncached_tokens(self, routing: RoutingRequest) -> int:
        """What the rank that has most of the prompt would have to compute: an estimate, which prefill corrects."""
        best = self._prefixes.local(routing).longest()
        cached = min(best * self._workers.group().block_tokens, routing.prompt_tokens - 1)
        return routing.prompt_tokens - cached

    async def _first(
        self,
        pairs: Iterable[Pair],
        placed: Placed,
        match: PrefixMatch,
        attempt: int,
        deadline: float,
        unclear: set[RankId],
    ) -> tuple[Reservation | None, list[HeadraceError]]:
        """The first of the pairs that accepts, and what those before it said. Raises what no other could do better."""
        refusals: list[HeadraceError] = []
        for pair in pairs:
            if pair.decode.id in unclear:
                continue
            try:
                return await self._reserve_at(pair, placed, match, attempt, deadline, unclear), refusals
            except HeadraceError as error:
                if not retry_elsewhere(error):
                    raise
                here, replica = computed_at_decode(pair), pair.decode.id.replica_id
                _log.info("decode refused", replica=replica, compute_here=here, error=str(error))
                refusals.append(error)
        return None, refusals

    async def _reserve_at(
        self,
        pair: Pair,
        placed: Placed,
        match: PrefixMatch,
        attempt: int,
        deadline: float,
        unclear: set[RankId],
    ) -> Reservation:
        worker = self._workers.worker(pair.decode.id)
        link = worker.link
        assert link is not None
        source = self._workers.worker(pair.prefill.id)
        sender = source.peer
        longest = self._timeout_s + (self._constraint_s if placed.spec.HasField("constraint") else 0.0)
        left = max(0.001, min(longest, deadline - self._clock.monotonic()))
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
        self._bookings.begin(pair, placed, own_id)
        stub = worker.decode
        # The call outlives the request's deadline and its client: without its answer nobody could give the grant back.
        call = stub.Reserve(request, timeout=longest, metadata=request_metadata())
        asked = asyncio.ensure_future(call)
        try:
            with closed_is_unavailable(f"decode replica {worker.replica.id}"):
                async with asyncio.timeout(left):
                    response = await asyncio.shield(asked)
        except BaseException as error:
            link.close(feed)
            self._bookings.end(pair, own_id, Amount())
            if not isinstance(error, grpc.aio.AioRpcError):
                unclear.add(pair.decode.id)
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
                unclear.add(pair.decode.id)
                self._workers.spawn(release(stub, own_id))
            raise typed from error
        if response.HasField("load"):
            self._workers.report(worker.replica, response.load, load_key(own_id))
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
