"""The embedded registry as seen from other processes of the machine: RegistryService over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

import grpc.aio

from headrace.services.runtime import errors, logs
from headrace.services.runtime.registry import wire
from headrace.services.runtime.registry.base import (
    Event,
    IncompatibleReplicaError,
    Lease,
    LeaseLostError,
    LostReason,
    RegistryError,
    RegistryUnavailableError,
    Replica,
    Role,
)
from headrace.services.runtime.registry.follow import Follower
from headrace.services.runtime.registry.lease import RenewedLease
from headrace.services.runtime.server import open_channel
from headrace.services.runtime.settings import RpcSettings
from headrace.services.runtime.tls import Tls
from headrace.v1 import common_pb2, registry_pb2, registry_pb2_grpc

T = TypeVar("T")
RECONNECT_SECONDS = 0.2
"""Pause before a broken watch is opened again."""
_log = logs.get(__name__)


class RemoteRegistry:
    """The Registry of a worker; `address` is the router's. Each call takes at most `timeout_seconds`."""

    def __init__(self, address: str, rpc: RpcSettings, timeout_seconds: float = 5.0, tls: Tls | None = None) -> None:
        self.address = address
        self._timeout = timeout_seconds
        self._channel = open_channel(address, rpc, tls=tls)
        self._stub = registry_pb2_grpc.RegistryServiceStub(self._channel)
        self._leases: set[_RemoteLease] = set()

    async def register(self, replica: Replica, ttl_seconds: float) -> Lease:
        """See Registry.register."""
        request = registry_pb2.RegisterRequest(replica=wire.to_wire(replica), lease_ms=round(ttl_seconds * 1000))
        response = await self._call(self._stub.Register(request, timeout=self._timeout))
        lease = _RemoteLease(self, replica, response.lease_id, response.lease_ms / 1000)
        self._leases.add(lease)
        lease.lost.add_done_callback(lambda _: self._leases.discard(lease))
        lease.begin()
        return lease

    async def members(self, roles: frozenset[Role] = frozenset()) -> tuple[Replica, ...]:
        """See Registry.members."""
        request = registry_pb2.ListRequest(roles=[wire.role_to_wire(role) for role in sorted(roles)])
        response = await self._call(self._stub.List(request, timeout=self._timeout))
        return tuple(wire.from_wire(message) for message in response.replicas)

    async def watch(self, roles: frozenset[Role] = frozenset()) -> AsyncGenerator[Event, None]:
        """See Registry.watch. Each new stream starts with the full membership, which heals every gap."""
        follower = Follower(roles)
        request = registry_pb2.RegistryServiceWatchRequest(roles=[wire.role_to_wire(role) for role in sorted(roles)])
        broken = False
        while True:
            stream = self._stub.Watch(request)
            try:
                async for message in stream:
                    broken = False
                    for event in _events(follower, message):
                        yield event
            except grpc.aio.AioRpcError as failure:
                if failure.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise errors.from_rpc_error(failure) from failure
                if not broken:
                    _log.warning("registry watch broke; reconnecting", address=self.address, status=failure.code().name)
                broken = True
            finally:
                stream.cancel()
            await asyncio.sleep(RECONNECT_SECONDS)

    async def close(self) -> None:
        """See Registry.close."""
        for lease in tuple(self._leases):
            await lease.abandon()
        await self._channel.close()

    async def renew(self, replica: Replica, lease_id: str, timeout_seconds: float) -> None:
        """One renewal. Raises LeaseLostError, RegistryUnavailableError."""
        request = registry_pb2.RegistryServiceRenewRequest(
            peer=_peer(replica),
            lease_id=lease_id,
            state=wire.state_to_wire(replica.state),
            loads=wire.loads_to_wire(replica.loads),
            ranks=wire.ranks_to_wire(replica.ranks),
        )
        await self._call(self._stub.Renew(request, timeout=timeout_seconds))

    async def deregister(self, replica: Replica, lease_id: str) -> None:
        """Leave. Raises RegistryUnavailableError."""
        request = registry_pb2.DeregisterRequest(peer=_peer(replica), lease_id=lease_id)
        await self._call(self._stub.Deregister(request, timeout=self._timeout))

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise RegistryError(f"{self.address} is no registry: {failure.details()}") from failure
            match errors.from_rpc_error(failure):
                case errors.Incompatible() as error:
                    raise IncompatibleReplicaError(error.message) from failure
                case errors.NotFound():
                    raise LeaseLostError(LostReason.EXPIRED) from failure
                case errors.Aborted():
                    raise LeaseLostError(LostReason.REPLACED) from failure
                case errors.Unavailable() | errors.DeadlineExceeded() as error:
                    raise RegistryUnavailableError(f"registry at {self.address}: {error.message}") from failure
                case error:
                    raise RegistryError(f"registry at {self.address}: {error}") from failure


class _RemoteLease(RenewedLease):
    def __init__(self, registry: RemoteRegistry, replica: Replica, lease_id: str, ttl_seconds: float) -> None:
        super().__init__(replica, ttl_seconds)
        self._registry = registry
        self._lease_id = lease_id

    def begin(self) -> None:
        self._start()

    async def _renew(self) -> None:
        await self._registry.renew(self._replica, self._lease_id, self._ttl_seconds / 3)

    async def _publish(self, replica: Replica) -> None:
        await self._registry.renew(replica, self._lease_id, self._ttl_seconds / 3)

    async def _revoke(self) -> None:
        await self._registry.deregister(self._replica, self._lease_id)


def _peer(replica: Replica) -> common_pb2.PeerId:
    return common_pb2.PeerId(replica_id=replica.id, incarnation=replica.incarnation)


def _events(follower: Follower, message: registry_pb2.RegistryServiceWatchResponse) -> list[Event]:
    match message.WhichOneof("change"):
        case "full":
            return follower.reset(wire.from_wire(replica) for replica in message.full.replicas)
        case "put":
            return follower.put(wire.from_wire(message.put))
        case "removed":
            return follower.removed(message.removed.replica_id, message.removed.incarnation)
        case _:
            return []
