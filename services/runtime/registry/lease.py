"""A lease that renews itself: the part that is the same for every registry."""

from __future__ import annotations

import abc
import asyncio

from headrace.services.runtime import logs
from headrace.services.runtime.registry.base import (
    LeaseLostError,
    LostReason,
    RegistryError,
    Replica,
    check_update,
)

_log = logs.get(__name__)


class RenewedLease(abc.ABC):
    """Renews every third of its time to live until released or lost; an unreachable registry is tried again.

    Subclasses say how to renew, publish and revoke; `_start` begins.
    """

    def __init__(self, replica: Replica, ttl_seconds: float) -> None:
        self._replica = replica
        self._ttl_seconds = ttl_seconds
        self._lost: asyncio.Future[LostReason] = asyncio.get_running_loop().create_future()
        self._renewals: asyncio.Task[None] | None = None
        self._released = False

    @property
    def replica(self) -> Replica:
        """What is published now."""
        return self._replica

    @property
    def lost(self) -> asyncio.Future[LostReason]:
        """See Lease.lost."""
        return self._lost

    async def update(self, replica: Replica) -> None:
        """See Lease.update."""
        check_update(self._replica, replica)
        if self._released:
            raise LeaseLostError(LostReason.EXPIRED)
        if self._lost.done():
            raise LeaseLostError(self._lost.result())
        if replica == self._replica:
            return
        try:
            await self._publish(replica)
        except LeaseLostError as error:
            self._lose(error.reason)
            raise
        self._replica = replica

    async def release(self) -> None:
        """See Lease.release."""
        if self._released:
            return
        self._released = True
        await self.abandon()
        if not self._lost.done():
            self._lost.cancel()
            await self._revoke()

    async def abandon(self) -> None:
        """Stop renewing without telling the registry; the lease expires by itself."""
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.gather(self._renewals, return_exceptions=True)
            self._renewals = None

    def _start(self) -> None:
        self._renewals = asyncio.create_task(self._renew_for_ever(), name=f"lease-{self._replica.id}")
        self._renewals.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A defect in renewing must not pass for a healthy lease: whoever waits for `lost` gets it."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._lost.done():
            self._lost.set_exception(error)

    async def _renew_for_ever(self) -> None:
        unreachable = False
        while not self._lost.done():
            await asyncio.sleep(self._ttl_seconds / 3)
            try:
                await self._renew()
            except LeaseLostError as error:
                self._lose(error.reason)
            except RegistryError as error:
                if not unreachable:
                    _log.warning("cannot renew; still trying", replica=self._replica.id, error=str(error))
                unreachable = True
            else:
                unreachable = False

    def _lose(self, reason: LostReason) -> None:
        if not self._lost.done():
            _log.warning("lease lost", replica=self._replica.id, reason=reason)
            self._lost.set_result(reason)

    @abc.abstractmethod
    async def _renew(self) -> None:
        """Prolong by the time to live. Raises LeaseLostError, RegistryUnavailableError; ends within about ttl / 3."""

    @abc.abstractmethod
    async def _publish(self, replica: Replica) -> None:
        """Make `replica` visible. Raises as `_renew`."""

    @abc.abstractmethod
    async def _revoke(self) -> None:
        """Give the lease up; raises RegistryUnavailableError."""
