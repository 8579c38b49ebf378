"""RegistryService: the embedded registry's table, for the workers of the machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any, Final

import grpc.aio

from headrace.services.runtime import errors, peers
from headrace.services.runtime.registry import wire
from headrace.services.runtime.registry.base import (
    ENGINE_ROLES,
    Added,
    Changed,
    IncompatibleReplicaError,
    LeaseLostError,
    LostReason,
    Rank,
    Removed,
    Role,
)
from headrace.services.runtime.registry.follow import Follower
from headrace.services.runtime.registry.table import MembershipTable
from headrace.v1 import common_pb2, registry_pb2, registry_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
LEASE_MS: Final = (200, 120_000)
"""Shortest and longest lease that is granted."""


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Serves one table. A lost lease is NOT_FOUND (unknown: register again) or ABORTED (replaced: stop)."""

    def __init__(self, table: MembershipTable) -> None:
        self._table = table

    async def Register(self, request: registry_pb2.RegisterRequest, context: _Context) -> registry_pb2.RegisterResponse:
        """See registry.proto."""
        try:
            replica = wire.from_wire(request.replica)
        except ValueError as error:
            raise errors.InvalidArgument(str(error), field="replica") from error
        peers.require_claim(request.replica.peer, field="replica.peer")
        caller = peers.caller()
        changes = caller is not None and caller.role is peers.PeerRole.WHOLE and replica.role in ENGINE_ROLES
        if caller is not None and caller.role.value != replica.role.value and not changes:
            raise errors.PermissionDenied(
                f"a certificate of role {caller.role.value} cannot register a {replica.role.value}",
                field="replica.role",
            )
        lease_ms = min(max(request.lease_ms, LEASE_MS[0]), LEASE_MS[1])
        try:
            lease_id = self._table.register(replica, lease_ms / 1000)
        except IncompatibleReplicaError as error:
            raise errors.Incompatible(str(error), field="replica.model") from error
        return registry_pb2.RegisterResponse(lease_id=lease_id, lease_ms=lease_ms, revision=self._table.revision)

    async def Renew(
        self, request: registry_pb2.RegistryServiceRenewRequest, context: _Context
    ) -> registry_pb2.RegistryServiceRenewResponse:
        """See registry.proto. State, loads and ranks become what the request says; a rank not in it stays."""
        peers.require_claim(request.peer, field="peer")
        who = (request.peer.replica_id, request.peer.incarnation, request.lease_id)
        try:
            old = self._table.get(*who)
            ranks = {rank.index: rank for rank in old.ranks}
            ranks |= {rank.index: wire.rank_from_wire(rank) for rank in request.ranks}
            new = replace(
                old,
                state=wire.state_from_wire(request.state),
                loads=tuple(load.SerializeToString(deterministic=True) for load in request.loads),
                ranks=_by_index(ranks.values()),
            )
            ttl_seconds = self._table.renew(*who, new)
        except LeaseLostError as error:
            if error.reason is LostReason.REPLACED:
                raise errors.Aborted(str(error), field="lease_id") from error
            raise errors.NotFound(str(error), field="lease_id") from error
        except wire.WireError as error:
            raise errors.InvalidArgument(str(error), field="state") from error
        return registry_pb2.RegistryServiceRenewResponse(lease_ms=round(ttl_seconds * 1000))

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: _Context
    ) -> registry_pb2.DeregisterResponse:
        """See registry.proto."""
        peers.require_claim(request.peer, field="peer")
        self._table.deregister(request.peer.replica_id, request.lease_id)
        return registry_pb2.DeregisterResponse()

    async def List(self, request: registry_pb2.ListRequest, context: _Context) -> registry_pb2.ListResponse:
        """See registry.proto."""
        roles = _roles(request.roles)
        members = [wire.to_wire(one) for one in self._table.members() if not roles or one.role in roles]
        return registry_pb2.ListResponse(replicas=members, revision=self._table.revision)

    async def Watch(
        self, request: registry_pb2.RegistryServiceWatchRequest, context: _Context
    ) -> AsyncIterator[registry_pb2.RegistryServiceWatchResponse]:
        """See registry.proto. A slow reader gets differences of states, so nothing queues up here (L12)."""
        follower = Follower(_roles(request.roles))
        revision = self._table.revision
        first = [wire.to_wire(event.replica) for event in follower.reset(self._table.members())]
        yield registry_pb2.RegistryServiceWatchResponse(revision=revision, full=registry_pb2.ReplicaSet(replicas=first))
        while True:
            revision = await self._table.wait_newer(revision)
            for event in follower.reset(self._table.members()):
                match event:
                    case Added(replica) | Changed(replica):
                        yield registry_pb2.RegistryServiceWatchResponse(revision=revision, put=wire.to_wire(replica))
                    case Removed(replica):
                        peer = common_pb2.PeerId(replica_id=replica.id, incarnation=replica.incarnation)
                        yield registry_pb2.RegistryServiceWatchResponse(revision=revision, removed=peer)


def _by_index(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    return tuple(sorted(ranks, key=lambda rank: rank.index))


def _roles(numbers: Iterable[int]) -> frozenset[Role]:
    try:
        return frozenset(wire.role_from_wire(number) for number in numbers)
    except wire.WireError as error:
        raise errors.InvalidArgument(str(error), field="roles") from error
