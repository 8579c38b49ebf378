"""Being a member for as long as the process lives, whatever happens to the registry meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headrace.services.runtime import logs
from headrace.services.runtime.registry.base import (
    IncompatibleReplicaError,
    Lease,
    LeaseLostError,
    LostReason,
    Registry,
    RegistryError,
    RegistryUnavailableError,
    Replica,
    State,
)

RETRY_SECONDS = 0.5
"""Pause between attempts to register while the registry cannot be reached."""
_log = logs.get(__name__)


class Membership:
    """Keeps one replica registered. `run` is a background task of the process (Lifecycle.spawn); it ends when another
    incarnation takes the id: `on_replaced` is called, and the process should stop. An incompatible layout raises
    IncompatibleReplicaError out of `run` (L14)."""

    def __init__(
        self, registry: Registry, replica: Replica, ttl_seconds: float, on_replaced: Callable[[], None]
    ) -> None:
        self._registry = registry
        self._ttl_seconds = ttl_seconds
        self._on_replaced = on_replaced
        self._wanted = replica
        self._lease: Lease | None = None
        self._news = asyncio.Event()
        self._left = False
        self.registered = asyncio.Event()
        """Set after the first successful registration."""

    @property
    def replica(self) -> Replica:
        """What should be published."""
        return self._wanted

    def publish(
        self,
        *,
        state: State | None = None,
        loads: tuple[bytes, ...] | None = None,
        agents: Mapping[int, bytes] | None = None,
    ) -> None:
        """Publish a new state, loads or transfer agents (by rank index). Never blocks; the latest wins."""
        wanted = self._wanted
        if state is not None:
            wanted = replace(wanted, state=state)
        if loads is not None:
            wanted = replace(wanted, loads=loads)
        if agents is not None:
            ranks = tuple(replace(rank, agent=agents.get(rank.index, rank.agent)) for rank in wanted.ranks)
            wanted = replace(wanted, ranks=ranks)
        self._wanted = wanted
        self._news.set()

    async def run(self) -> None:
        """Register, publish, and register again whenever the registry has forgotten us."""
        while not self._left:
            try:
                lease = await self._registry.register(self._wanted, self._ttl_seconds)
            except RegistryError as error:
                # One that refuses from the start is not to be waited for. Later it may be in trouble of its own, of
                # which a member that serves must not die.
                passing = isinstance(error, RegistryUnavailableError) or self.registered.is_set()
                if not passing or isinstance(error, IncompatibleReplicaError):
                    raise
                _log.warning("cannot register yet", replica=self._wanted.id, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if self._left:
                await lease.release()
                return
            self._lease = lease
            self.registered.set()
            _log.info("registered", replica=self._wanted.id, incarnation=self._wanted.incarnation)
            if await self._hold(lease) is LostReason.REPLACED:
                _log.error("another process took this replica id", replica=self._wanted.id)
                self._on_replaced()
                return

    async def leave(self) -> None:
        """Leave the registry; call it when nothing is served any more (Lifecycle.on_close), not when draining begins,
        as peers take a member that is gone for dead. For draining, publish(state=State.DRAINING)."""
        self._left = True
        if self._lease is not None:
            try:
                await self._lease.release()
            except RegistryError as error:
                _log.warning("left without telling the registry", replica=self._wanted.id, error=str(error))

    async def _hold(self, lease: Lease) -> LostReason | None:
        """Publish what `publish` says until the lease is lost; returns why, None when `leave` released it."""
        while True:
            news: asyncio.Future[Any] = asyncio.ensure_future(self._news.wait())
            waits: tuple[asyncio.Future[Any], ...] = (news, lease.lost)
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            if lease.lost.done():
                return None if lease.lost.cancelled() else lease.lost.result()
            self._news.clear()
            try:
                await lease.update(self._wanted)
            except LeaseLostError as error:
                return error.reason
            except RegistryError as error:
                _log.warning("cannot publish yet", replica=self._wanted.id, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                self._news.set()
