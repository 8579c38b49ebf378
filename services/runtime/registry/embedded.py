"""The registry of one machine: it lives in the router process, workers reach it over RegistryService.

After a restart of the router it knows nobody; each worker's next renewal is answered "unknown lease" and it registers
again (registry/member.py), so that the membership is whole again within a third of the time to live.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from headrace.services.runtime import logs
from headrace.services.runtime.registry.base import Event, Lease, Replica, Role
from headrace.services.runtime.registry.follow import Follower
from headrace.services.runtime.registry.lease import RenewedLease
from headrace.services.runtime.registry.table import MembershipTable

_log = logs.get(__name__)


class EmbeddedRegistry:
    """The Registry as the router process itself uses it: direct calls on the table."""

    def __init__(self, table: MembershipTable | None = None) -> None:
        self.table = MembershipTable() if table is None else table
        self._reaper = asyncio.create_task(self.table.run_reaper(), name="registry-reaper")
        self._reaper.add_done_callback(_tell_death)
        self._leases: set[_LocalLease] = set()

    async def register(self, replica: Replica, ttl_seconds: float) -> Lease:
        """See Registry.register."""
        lease = _LocalLease(self.table, replica, ttl_seconds)
        self._leases.add(lease)
        lease.lost.add_done_callback(lambda _: self._leases.discard(lease))
        return lease

    async def members(self, roles: frozenset[Role] = frozenset()) -> tuple[Replica, ...]:
        """See Registry.members."""
        return tuple(replica for replica in self.table.members() if not roles or replica.role in roles)

    async def watch(self, roles: frozenset[Role] = frozenset()) -> AsyncGenerator[Event, None]:
        """See Registry.watch."""
        follower = Follower(roles)
        revision = -1
        while True:
            revision = await self.table.wait_newer(revision)
            for event in follower.reset(self.table.members()):
                yield event

    async def close(self) -> None:
        """See Registry.close."""
        for lease in tuple(self._leases):
            await lease.abandon()
        self._reaper.cancel()
        await asyncio.gather(self._reaper, return_exceptions=True)


def _tell_death(reaper: asyncio.Task[None]) -> None:
    if not reaper.cancelled() and (error := reaper.exception()) is not None:
        _log.critical("the registry's reaper died; dead replicas stay members: restart this process", exc_info=error)


class _LocalLease(RenewedLease):
    def __init__(self, table: MembershipTable, replica: Replica, ttl_seconds: float) -> None:
        super().__init__(replica, ttl_seconds)
        self._table = table
        self._lease_id = table.register(replica, ttl_seconds)
        self._start()

    async def _renew(self) -> None:
        self._table.renew(self._replica.id, self._replica.incarnation, self._lease_id)

    async def _publish(self, replica: Replica) -> None:
        self._table.renew(self._replica.id, self._replica.incarnation, self._lease_id, replica)

    async def _revoke(self) -> None:
        self._table.deregister(self._replica.id, self._lease_id)
