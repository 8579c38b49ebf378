"""The registry of a cluster: etcd leases, watches and transactions.

Key PREFIX + "replicas/" + id holds a serialised headrace.v1.Replica and is attached to its holder's lease.

Registration reads all replicas at one revision, checks that the newcomer fits (L14), and puts it in a transaction that
fails if any replica changed since, so that of two incompatible replicas that start together one is refused.

A watch reads everything at revision R and follows from R + 1. Whenever it is interrupted (a broken connection,
compaction, an etcd restored from a backup) it does the same again and tells the difference (follow.py). That is one
path for all interruptions; resuming at a revision would be a second one, and needs this one behind it anyway.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from google.protobuf.message import DecodeError

from headrace.services.runtime import logs
from headrace.services.runtime.registry import wire
from headrace.services.runtime.registry._etcd import rpc_pb2 as pb
from headrace.services.runtime.registry.base import (
    Event,
    Lease,
    LeaseLostError,
    LostReason,
    RegistryError,
    RegistryUnavailableError,
    Replica,
    Role,
    check_compatible,
)
from headrace.services.runtime.registry.etcd_client import EtcdClient, LeaseNotFoundError, prefix_end
from headrace.services.runtime.registry.follow import Follower
from headrace.services.runtime.registry.lease import RenewedLease
from headrace.services.runtime.settings import RpcSettings
from headrace.services.runtime.tls import Tls
from headrace.v1 import registry_pb2

RECONNECT_SECONDS: Final = 0.2
"""Pause before an interrupted watch reads again."""
ATTEMPTS: Final = 50
"""Transactions tried before a registration gives up: each failure means that another replica got in between."""
_log = logs.get(__name__)


class EtcdRegistry:
    """The Registry in etcd at `endpoints` (host:port). Clusters that share an etcd differ in `prefix`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str,
        rpc: RpcSettings,
        timeout_seconds: float = 5.0,
        tls: Tls | None = None,
    ) -> None:
        self.client = EtcdClient(endpoints, rpc, timeout_seconds, tls)
        self._prefix = prefix.encode() + b"replicas/"
        self._leases: set[_EtcdLease] = set()

    async def register(self, replica: Replica, ttl_seconds: float) -> Lease:
        """See Registry.register. etcd counts in seconds and grants no less than its election timeout × 1.5."""
        lease_id, granted = await self.client.grant(math.ceil(ttl_seconds))
        try:
            replaced = await self._put(replica, lease_id)
        except LeaseNotFoundError as error:
            # etcd or this process stood still for the lease's life between the two calls. That ends no process.
            raise RegistryUnavailableError(f"the lease ended before {replica.id} was registered; try again") from error
        except BaseException:
            await self._quietly_revoke(lease_id)
            raise
        if replaced:
            # The key is ours now; without this the old holder would renew an empty lease and never learn of it.
            await self._quietly_revoke(replaced)
        lease = _EtcdLease(self, replica, lease_id, granted)
        self._leases.add(lease)
        lease.lost.add_done_callback(lambda _: self._leases.discard(lease))
        lease.begin()
        return lease

    async def members(self, roles: frozenset[Role] = frozenset()) -> tuple[Replica, ...]:
        """See Registry.members."""
        living, _, _ = await self._read()
        return tuple(replica for replica in living if not roles or replica.role in roles)

    async def watch(self, roles: frozenset[Role] = frozenset()) -> AsyncGenerator[Event, None]:
        """See Registry.watch."""
        follower = Follower(roles)
        broken = False
        while True:
            try:
                living, revision, _ = await self._read()
                broken = False
                for event in follower.reset(living):
                    yield event
                async with aclosing(self.client.watch_prefix(self._prefix, revision + 1)) as changes:
                    async for change in changes:
                        for event in self._news(follower, change):
                            yield event
            except RegistryError as error:
                if not broken:
                    _log.warning("registry watch broke; reading again", error=str(error))
                broken = True
            await asyncio.sleep(RECONNECT_SECONDS)

    async def close(self) -> None:
        """See Registry.close."""
        for lease in tuple(self._leases):
            await lease.abandon()
        await self.client.close()

    async def publish(self, replica: Replica, lease_id: int) -> None:
        """Put a replica's new facts while its key is attached to the lease. Raises LeaseLostError."""
        key = self._key(replica.id)
        mine = pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.LEASE, key=key, lease=lease_id)
        try:
            held = await self.client.put_if(key, _encode(replica), lease_id, mine)
        except LeaseNotFoundError:
            held = False
        if not held:
            raise LeaseLostError(await self._why_lost(replica))

    async def renew(self, replica: Replica, lease_id: int, timeout_seconds: float) -> None:
        """Renew a lease once. Raises LeaseLostError."""
        try:
            await self.client.keep_alive(lease_id, timeout_seconds)
        except LeaseNotFoundError as error:
            raise LeaseLostError(await self._why_lost(replica)) from error

    async def _why_lost(self, replica: Replica) -> LostReason:
        pair = await self.client.read(self._key(replica.id))
        holder = None if pair is None else _decode(pair)
        if holder is None or holder.incarnation == replica.incarnation:
            return LostReason.EXPIRED
        return LostReason.REPLACED

    async def _put(self, replica: Replica, lease_id: int) -> int:
        """Put a newcomer if it fits; returns the lease that its key had before, or 0."""
        key = self._key(replica.id)
        for _ in range(ATTEMPTS):
            living, revision, leases = await self._read()
            check_compatible(replica, living)
            unchanged = pb.Compare(
                result=pb.Compare.LESS,
                target=pb.Compare.MOD,
                key=self._prefix,
                range_end=prefix_end(self._prefix),
                mod_revision=revision + 1,
            )
            if await self.client.put_if(key, _encode(replica), lease_id, unchanged):
                return leases.get(replica.id, 0)
        raise RegistryUnavailableError(f"replicas kept changing during {ATTEMPTS} attempts to register; try again")

    async def _read(self) -> tuple[list[Replica], int, dict[str, int]]:
        """Living replicas by id, the revision, and the lease of each id."""
        pairs, revision = await self.client.read_prefix(self._prefix)
        living = [replica for pair in pairs if (replica := _decode(pair)) is not None]
        leases = {pair.key[len(self._prefix) :].decode(): pair.lease for pair in pairs}
        return living, revision, leases

    def _news(self, follower: Follower, change: pb.Event) -> list[Event]:
        if change.type == pb.Event.DELETE:
            return follower.removed(change.kv.key[len(self._prefix) :].decode())
        replica = _decode(change.kv)
        return [] if replica is None else follower.put(replica)

    def _key(self, identifier: str) -> bytes:
        return self._prefix + identifier.encode()

    async def _quietly_revoke(self, lease_id: int) -> None:
        try:
            await self.client.revoke(lease_id)
        except RegistryError as error:
            _log.warning("could not revoke a lease; it expires by itself", lease=f"{lease_id:x}", error=str(error))


class _EtcdLease(RenewedLease):
    def __init__(self, registry: EtcdRegistry, replica: Replica, lease_id: int, ttl_seconds: float) -> None:
        super().__init__(replica, ttl_seconds)
        self._registry = registry
        self._lease_id = lease_id

    def begin(self) -> None:
        self._start()

    async def _renew(self) -> None:
        await self._registry.renew(self._replica, self._lease_id, self._ttl_seconds / 3)

    async def _publish(self, replica: Replica) -> None:
        await self._registry.publish(replica, self._lease_id)

    async def _revoke(self) -> None:
        await self._registry.client.revoke(self._lease_id)


def _encode(replica: Replica) -> bytes:
    return wire.to_wire(replica).SerializeToString()


def _decode(pair: pb.KeyValue) -> Replica | None:
    """The replica of a pair; None, with a warning, for what this version cannot read (a newer role, another writer):
    one strange key must not blind the whole cluster (L13)."""
    try:
        return wire.from_wire(registry_pb2.Replica.FromString(pair.value))
    except (DecodeError, ValueError) as error:
        _log.warning("unreadable replica skipped", key=pair.key.decode(errors="replace"), error=str(error))
        return None
