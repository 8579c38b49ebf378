"""The embedded registry's state: members, leases, reaper. No sockets; one event loop's thread uses it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace.services.runtime.clock import Clock, SystemClock
from headrace.services.runtime.ids import new_request_id
from headrace.services.runtime.registry.base import (
    LeaseLostError,
    LostReason,
    Replica,
    check_compatible,
    check_update,
)


@dataclass(slots=True)
class _Member:
    replica: Replica
    lease_id: str
    ttl_seconds: float
    expires: float
    """On the table's monotonic clock."""


class MembershipTable:
    """Living members by id. `reap` must run on a clock of its own (L9): `run_reaper` does that."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = SystemClock() if clock is None else clock
        self._members: dict[str, _Member] = {}
        self._changed = asyncio.Event()
        self._last_reap = self._clock.monotonic()
        self.revision = 0
        """Rises with every change that a watcher can see."""

    def members(self) -> tuple[Replica, ...]:
        """Living members by id."""
        return tuple(self._members[identifier].replica for identifier in sorted(self._members))

    def register(self, replica: Replica, ttl_seconds: float) -> str:
        """Add, replace or take over; returns the new lease's id. Raises IncompatibleReplicaError (L14)."""
        check_compatible(replica, (member.replica for member in self._members.values()))
        lease_id = new_request_id()
        now = self._clock.monotonic()
        self._members[replica.id] = _Member(replica, lease_id, ttl_seconds, now + ttl_seconds)
        self._bump()
        return lease_id

    def renew(self, identifier: str, incarnation: str, lease_id: str, replica: Replica | None = None) -> float:
        """Prolong a lease, publishing `replica` if given; returns the time to live. Raises LeaseLostError."""
        member = self._held(identifier, incarnation, lease_id)
        member.expires = self._clock.monotonic() + member.ttl_seconds
        if replica is not None and replica != member.replica:
            check_update(member.replica, replica)
            member.replica = replica
            self._bump()
        return member.ttl_seconds

    def get(self, identifier: str, incarnation: str, lease_id: str) -> Replica:
        """What the lease publishes. Raises LeaseLostError."""
        return self._held(identifier, incarnation, lease_id).replica

    def deregister(self, identifier: str, lease_id: str) -> None:
        """Remove the member if it still holds that lease."""
        member = self._members.get(identifier)
        if member is not None and member.lease_id == lease_id:
            del self._members[identifier]
            self._bump()

    def reap(self) -> list[Replica]:
        """Remove members whose lease is over; returns them.

        When this table itself did not run (its process was stopped, its loop hung), it could not have heard renewals:
        that time counts for nobody, as expiry is by evidence of death (L8).
        """
        now = self._clock.monotonic()
        deaf = now - self._last_reap - 2 * self.reap_interval()
        self._last_reap = now
        if deaf > 0:
            for member in self._members.values():
                member.expires += deaf
        dead = [member.replica for member in self._members.values() if member.expires <= now]
        for replica in dead:
            del self._members[replica.id]
        if dead:
            self._bump()
        return dead

    def reap_interval(self) -> float:
        """Seconds between two reaps: an eighth of the shortest lease, at most 0.5."""
        return min([0.5, *(member.ttl_seconds / 8 for member in self._members.values())])

    async def run_reaper(self) -> None:
        """Reap for ever."""
        while True:
            await asyncio.sleep(self.reap_interval())
            self.reap()

    async def wait_newer(self, revision: int) -> int:
        """Wait until the revision is above `revision`; returns it."""
        while self.revision <= revision:
            await self._changed.wait()
        return self.revision

    def _bump(self) -> None:
        self.revision += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _held(self, identifier: str, incarnation: str, lease_id: str) -> _Member:
        member = self._members.get(identifier)
        if member is not None and member.replica.incarnation != incarnation:
            raise LeaseLostError(LostReason.REPLACED)
        if member is None or member.lease_id != lease_id:
            raise LeaseLostError(LostReason.EXPIRED)
        return member
