"""The cache tier of one worker process: opened from its settings, wired to its engine, closed in order.

1. ``WorkerTier.open``: before the engine, which offers to ``tier.sink``
2. ``meet``: before the transfer agent is described to peers
3. ``connect``: when there is a link to the engine
4. ``serve``, ``tasks``: as the process comes up
5. ``close``: after the engine has stopped
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from headrace.engine.tier_messages import OfferPrefix, TierUnpin
from headrace.kvcache.cache_events import EventSink
from headrace.kvcache.entries import TierSource
from headrace.kvcache.event_log import EventLog, Source
from headrace.kvcache.host.arena import arena_shape
from headrace.kvcache.host.budget import HostBudget
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.memory import buffer_of, host_slabs
from headrace.kvcache.pool import KVPool
from headrace.kvcache.store.base import Store
from headrace.kvcache.store.listing import stored_events
from headrace.kvcache.store.open import open_store
from headrace.kvcache.tier.loader import TierLoader
from headrace.kvcache.tier.types import Lacking, TierSink
from headrace.kvcache.tier.writer import TierWriter
from headrace.kvcache.transfer.base import TransferEngine
from headrace.services.runtime import logs
from headrace.services.runtime.memory import read_budget
from headrace.services.runtime.registry.base import Registry
from headrace.services.runtime.server import ServiceServer
from headrace.services.worker.cache_settings import CacheSection
from headrace.services.worker.channels import Channels
from headrace.services.worker.engine_link import EngineLink
from headrace.services.worker.tier.peer_wire import Reader
from headrace.services.worker.tier.peers import HostPeers
from headrace.services.worker.tier.preload import PrefillSpeed, Preloader
from headrace.services.worker.tier.store_writers import StoreWriters
from headrace.services.worker.tier.weed_volumes import WeedVolumes

_log = logs.get(__name__)
THREE_FS = "3fs://"
"""Where hosts share a store whose locks do not reach across them."""
HOST_FRACTION = 0.5
"""Of what the cgroup leaves, for all host tiers of a machine whose workers divide it themselves."""


@dataclass(frozen=True)
class HostMemory:
    """A host tier, its memory (uint8 [slabs, slab_bytes], for registration), and who gave it."""

    tier: HostTier
    memory: torch.Tensor
    budget: HostBudget | None


class WorkerTier:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        settings: CacheSection,
        pool: KVPool,
        incarnation: str,
        *,
        host: HostMemory | None,
        store: Store | None,
        store_events: EventLog | None,
        store_writers: StoreWriters | None = None,
    ) -> None:
        self._settings = settings
        self._layout: KVLayout = pool.layout
        self._incarnation = incarnation
        self.host_memory = host
        self.store = store
        self.store_events = store_events
        self._store_writers = store_writers
        self.speed = PrefillSpeed()
        self._link: EngineLink | None = None
        self.peers: HostPeers | None = None
        self.loader: TierLoader | None = None
        self.preloader: Preloader | None = None
        """None until `connect`, and without a tier."""
        self.writer: TierWriter | None = None
        if host is not None or store is not None:
            self.writer = TierWriter(pool, host=self.host, store=store, unpin=self._unpin, offer=self._offer)

    @classmethod
    async def open(
        cls, settings: CacheSection, pool: KVPool, *, replica_id: str, incarnation: str, events: EventSink
    ) -> WorkerTier:
        """`events` takes what the host tier says; the store has a log of its own (`store_events`).

        Raises StoreError, BudgetError, which say what to do.
        """
        host = _host_memory(settings, pool.layout, incarnation, events)
        store: Store | None = None
        log: EventLog | None = None
        writers: StoreWriters | None = None
        if settings.store:
            asked = settings.store_settings()
            if asked.url.startswith(THREE_FS):
                writers = StoreWriters()
                asked = replace(asked, boot=incarnation)
            # Too much to be mirrored by every writer: snapshots list the index, which other writers fill too.
            log = EventLog(
                Source(replica_id, secrets.token_hex(8)),
                pool.layout.block_tokens,
                contents=lambda: () if store is None else stored_events(store),
            )
            store = await asyncio.to_thread(
                partial(
                    open_store,
                    asked,
                    events=log.append,
                    liveness=None if writers is None else writers.lives,
                    volume_files=WeedVolumes,
                )
            )
            _log.info("store opened", url=settings.store)
        return cls(settings, pool, incarnation, host=host, store=store, store_events=log, store_writers=writers)

    @property
    def host(self) -> HostTier | None:
        return None if self.host_memory is None else self.host_memory.tier

    @property
    def sink(self) -> TierSink | None:
        """Where the engine offers what it computes; None: it need not."""
        return self.writer

    @property
    def idle(self) -> bool:
        """Nothing of the pool is pinned for a copy, or held for a load."""
        return (self.writer is None or self.writer.idle) and (self.preloader is None or self.preloader.loading == 0)

    async def writable(self) -> int:
        """Places that peers may still write."""
        if self.peers is None:
            return 0
        stats = self.peers.buffer.stats()
        return stats.in_use + stats.quarantined

    def meet(self, own: Reader, transfer: TransferEngine, channels: Channels) -> None:
        """Open the host tier to workers of the same model, and theirs to this one."""
        if self.host_memory is not None and self._settings.peers:
            self.peers = HostPeers(
                self.host_memory.tier,
                self.host_memory.memory,
                own,
                transfer,
                channels,
                buffer_bytes=int(self._settings.peer_buffer_bytes),
            )

    def serve(self, server: ServiceServer) -> None:
        """What peers call."""
        if self.peers is not None:
            server.add(*self.peers.service)

    def tasks(self, registry: Registry) -> list[Coroutine[Any, Any, None]]:
        """For the life of the process, once it has joined."""
        peers = [] if self.peers is None else self.peers.tasks(registry)
        return peers if self._store_writers is None else [*peers, self._store_writers.follow(registry)]

    def connect(self, link: EngineLink, *, loads: bool) -> None:
        """The engine can be reached now. `loads`: this role loads prefixes (prefill)."""
        self._link = link
        if self.writer is None:
            return
        self.writer.start()
        if loads:
            sources: list[TierSource] = [] if self.host is None else [self.host]
            sources += [] if self.peers is None else [self.peers.source]
            sources += [] if self.store is None else [self.store]
            self.loader = TierLoader(
                sources,
                self._layout,
                self._settings.load_settings(),
                token_seconds=lambda: self.speed.token_seconds,
                keep=None if self.host is None else self.host.put,
            )
            self.preloader = Preloader(link, self.loader, self.writer, self._layout, self._settings.max_loads)

    def problems(self) -> tuple[str, ...]:
        """What an integrity check of the host tier and its peers' leases found (L11)."""
        found = () if self.host is None else self.host.integrity().problems
        return found if self.peers is None else (*found, *self.peers.problems())

    async def close(self) -> None:
        """After the engine has stopped: copy what it offered, make the store durable, give memory back."""
        began = time.monotonic()
        if self.preloader is not None:
            self.preloader.close()
        if self.loader is not None:
            self.loader.close()
        if self.writer is not None and not await asyncio.to_thread(self.writer.close, self._settings.flush_seconds):
            _log.warning("offers to the cache tier are left uncopied")
        if self.store is not None:
            left = max(0.0, began + self._settings.flush_seconds - time.monotonic())
            if not await asyncio.to_thread(self.store.flush, left):
                _log.warning("the store did not become durable in time", stats=str(self.store.stats()))
            await asyncio.to_thread(self.store.close)
        if self.host_memory is not None and self.host_memory.budget is not None:
            await asyncio.to_thread(self.host_memory.budget.release, self._incarnation)

    def _unpin(self, pins: tuple[str, ...]) -> None:
        """On the writer's thread. An engine that has stopped pins nothing any more."""
        if self._link is not None:
            self._link.submit(TierUnpin(pins))

    def _offer(self, lacking: Lacking) -> None:
        """On the writer's thread."""
        if self._link is not None:
            self._link.submit(OfferPrefix(lacking.scope, lacking.retention, lacking.blocks, lacking.snapshots))


def _host_memory(settings: CacheSection, layout: KVLayout, incarnation: str, events: EventSink) -> HostMemory | None:
    wanted, budget = int(settings.host_bytes), None
    if not wanted:
        return None
    if settings.host_budget_directory is not None:
        budget = HostBudget(settings.host_budget_directory, lambda: int(read_budget().available_bytes * HOST_FRACTION))
        wanted = budget.claim(incarnation, wanted)
    shape = arena_shape(wanted, layout.block_bytes, layout.snapshot_bytes)
    memory = host_slabs(shape.slabs, shape.slab_bytes)
    _log.info("host tier", bytes=shape.total_bytes, wanted=int(settings.host_bytes))
    return HostMemory(HostTier(buffer_of(memory), shape, events=events), memory, budget)
