"""ControlService of any process: state, counters, integrity, drain, role. What a process has, its `Inspect` tells."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from headrace.services.runtime.cache_operations import CacheOperations, Metadata
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.durations import seconds
from headrace.services.runtime.errors import FailedPrecondition, InvalidArgument, Unimplemented
from headrace.services.runtime.health import Health
from headrace.services.runtime.intake import Intake
from headrace.services.runtime.live import LiveSet, Outcome
from headrace.services.runtime.lives import ChangeRole, Lives
from headrace.services.runtime.registry.base import Replica
from headrace.services.runtime.registry.wire import role_from_wire, state_to_wire
from headrace.services.runtime.registry.wire import to_wire as replica_to_wire
from headrace.v1 import common_pb2, control_pb2, control_pb2_grpc, registry_pb2

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Inspection:
    """What a process tells of its inside; empty where it has none."""

    requests: control_pb2.Conservation
    pools: tuple[control_pb2.PoolStatus, ...] = ()
    loads: tuple[common_pb2.LoadReport, ...] = ()
    members: tuple[registry_pb2.Replica, ...] = ()
    transports: tuple[control_pb2.TransportStatus, ...] = ()
    problems: tuple[str, ...] = field(default=())
    """Of the integrity check, where it was asked for."""


def conservation(live: LiveSet[Any]) -> control_pb2.Conservation:
    """The wire form of a live set (L11)."""
    return control_pb2.Conservation(
        accepted=live.accepted,
        live=len(live),
        finished=live.ended(Outcome.FINISHED),
        cancelled=live.ended(Outcome.CANCELLED),
        deadline=live.ended(Outcome.DEADLINE),
        failed=live.ended(Outcome.FAILED),
        refused=live.ended(Outcome.REFUSED),
        invalid=live.ended(Outcome.INVALID),
        unavailable=live.ended(Outcome.UNAVAILABLE),
    )


def _metadata(context: _Context) -> Metadata:
    return tuple((key, value) for key, value in context.invocation_metadata() or ())


Inspect = Callable[[bool], Awaitable[Inspection]]
"""Called with whether the integrity checks are to run."""
Authorise = Callable[[Metadata], object]
"""Raises Unauthenticated or PermissionDenied for a call whose metadata brings no operator's credential."""


def anyone(metadata: Metadata) -> None:
    """Of processes whose ports are the cluster's own: who reaches them may operate."""


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Status, Drain, ChangeRole and the cache. Key management comes with its subsystem and is refused until then."""

    def __init__(
        self,
        replica: Callable[[], Replica],
        health: Health,
        inspect: Inspect,
        intake: Intake,
        clock: Clock,
        lives: Lives,
        change_role: ChangeRole | None = None,
        caches: CacheOperations | None = None,
        authorise: Authorise = anyone,
    ) -> None:
        """`change_role` None: this process has one role; `caches` None: it has none. `authorise` guards Status, Drain
        and ChangeRole; `caches` looks at the metadata itself, to log who asked."""
        self._replica = replica
        self._health = health
        self._inspect = inspect
        self._intake = intake
        self._clock = clock
        self._lives = lives
        self._change_role = change_role
        self._caches = caches
        self._authorise = authorise
        self._started = clock.monotonic()

    async def Status(self, request: control_pb2.StatusRequest, context: _Context) -> control_pb2.StatusResponse:
        """See control.proto."""
        self._authorise(_metadata(context))
        inside = await self._inspect(request.check_integrity)
        replica = replica_to_wire(self._replica())
        if inside.loads:
            del replica.loads[:]
            replica.loads.extend(inside.loads)
        return control_pb2.StatusResponse(
            replica=replica,
            ready=self._health.ready,
            unready_reason=self._health.reason,
            requests=inside.requests,
            pools=inside.pools,
            integrity=control_pb2.Integrity(checked=request.check_integrity, problems=inside.problems),
            uptime_ms=round((self._clock.monotonic() - self._started) * 1000),
            members=inside.members,
            transports=inside.transports,
            role_change=self._lives.change,
        )

    async def Drain(self, request: control_pb2.DrainRequest, context: _Context) -> control_pb2.DrainResponse:
        """See control.proto."""
        self._authorise(_metadata(context))
        intake = self._intake
        if request.resume:
            if request.wait_ms or request.hand_over:
                raise InvalidArgument("takes work again and waits for nothing: leave the others unset", field="resume")
            await intake.resume()
        else:
            if request.hand_over and intake.hand_over is None:
                role = self._replica().role
                raise Unimplemented("hand_over", f"a {role} hands nothing over; leave the field unset")
            await intake.drain(seconds(request.wait_ms, "wait_ms"), hand_over=request.hand_over)
        return control_pb2.DrainResponse(live=intake.live, state=state_to_wire(intake.state))

    async def ChangeRole(
        self, request: control_pb2.ChangeRoleRequest, context: _Context
    ) -> control_pb2.ChangeRoleResponse:
        """See control.proto."""
        self._authorise(_metadata(context))
        try:
            wanted = role_from_wire(request.role)
        except ValueError as error:
            raise InvalidArgument(str(error), field="role") from error
        wait_s = seconds(request.wait_ms, "wait_ms")
        own = self._replica().role
        if self._change_role is None:
            raise Unimplemented("role", f"a {own} has one role for life; stop it and start a {wanted}")
        if self._intake.ending:
            raise FailedPrecondition(f"{self._intake.ending}: it takes no other role")
        if wanted is own:
            done = control_pb2.ROLE_CHANGE_STATE_DONE
            same = control_pb2.RoleChange(from_role=request.role, to_role=request.role, state=done)
            return control_pb2.ChangeRoleResponse(change=same)
        await self._change_role(wanted, wait_s)
        return control_pb2.ChangeRoleResponse(change=self._lives.change)

    async def ClearCache(
        self, request: control_pb2.ClearCacheRequest, context: _Context
    ) -> control_pb2.ClearCacheResponse:
        """See control.proto."""
        return await self._cache("scope").clear(request, _metadata(context))

    async def CacheStats(
        self, request: control_pb2.CacheStatsRequest, context: _Context
    ) -> control_pb2.CacheStatsResponse:
        """See control.proto."""
        return await self._cache("tiers").stats(request, _metadata(context))

    async def FindCache(
        self, request: control_pb2.FindCacheRequest, context: _Context
    ) -> control_pb2.FindCacheResponse:
        """See control.proto."""
        return await self._cache("of").find(request, _metadata(context))

    async def PinCache(self, request: control_pb2.PinCacheRequest, context: _Context) -> control_pb2.PinCacheResponse:
        """See control.proto."""
        return await self._cache("of").pin(request, _metadata(context))

    async def VerifyCache(
        self, request: control_pb2.VerifyCacheRequest, context: _Context
    ) -> AsyncIterator[control_pb2.VerifyCacheResponse]:
        """See control.proto."""
        async for response in self._cache("store").verify(request, _metadata(context)):
            yield response

    async def CollectCache(
        self, request: control_pb2.CollectCacheRequest, context: _Context
    ) -> control_pb2.CollectCacheResponse:
        """See control.proto."""
        return await self._cache("store").collect(request, _metadata(context))

    def _cache(self, field: str) -> CacheOperations:
        if self._caches is None:
            raise Unimplemented(field, "this process keeps no prefixes; ask a router, prefill or decode")
        return self._caches

    async def ListKeys(self, request: control_pb2.ListKeysRequest, context: _Context) -> control_pb2.ListKeysResponse:
        """Refused: comes with key management."""
        raise Unimplemented("keys", "this process has no key management")

    async def RotateKey(
        self, request: control_pb2.RotateKeyRequest, context: _Context
    ) -> control_pb2.RotateKeyResponse:
        """Refused: comes with key management."""
        raise Unimplemented("keys", "this process has no key management")
