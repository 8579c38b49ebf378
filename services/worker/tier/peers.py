"""Host tiers of the workers of one model, open to each other: what a worker's main file puts together.

```python
peers = HostPeers(tier, memory, own, transfer, channels, buffer_bytes=…)  # before `published()` describes the agent
process.server.add(*peers.service)
loader = TierLoader([tier, peers.source, store], …)
…
for task in peers.tasks(registry):  # after joining
    life.spawn(task, "cache-peers")
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from headrace.kvcache.host.arena import ArenaShape, arena_shape
from headrace.kvcache.host.buffer import FetchBuffer
from headrace.kvcache.host.leases import MAX_SECONDS, LeaseTable
from headrace.kvcache.host.peers import PeerHostSource
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.memory import buffer_of, host_slabs
from headrace.kvcache.transfer.base import TransferEngine
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.registry.base import Registry, Role
from headrace.services.runtime.server import Described
from headrace.services.worker.channels import Channels
from headrace.services.worker.senders import SenderWatch
from headrace.services.worker.tier.peer_service import HOST_TIER, CachePeerServicer
from headrace.services.worker.tier.peer_wire import FETCHED, GrpcPeerWire, Lessors, Reader
from headrace.v1 import cache_pb2, cache_pb2_grpc

REAP_S = 0.05
"""How often leases are looked at, on a clock of their own (L9): how long a place may stay pinned too long."""


class HostPeers:
    """Both sides of one worker: its tier for peers to read, and theirs as a source."""

    def __init__(
        self,
        tier: HostTier,
        memory: torch.Tensor,
        own: Reader,
        transfer: TransferEngine,
        channels: Channels,
        *,
        buffer_bytes: int,
        max_peers: int = 4,
        max_lease_s: float = MAX_SECONDS,
        max_leased_bytes: int | None = None,
    ) -> None:
        """memory: the tier's, uint8 [slabs, slab_bytes]. buffer_bytes: where peers' entries arrive; at least one slab
        is made.

        On the event loop's thread. Registers both with the transfer engine.
        """
        self._transfer = transfer
        self.leases = LeaseTable(tier, max_seconds=max_lease_s, max_bytes=max_leased_bytes)
        if memory.numel():
            transfer.register(MemoryRegion(HOST_TIER, memory, RegionRole.READABLE))
        shape = arena_shape(buffer_bytes, tier.shape.block_bytes, tier.shape.snapshot_bytes)
        shape = ArenaShape(shape.block_bytes, shape.snapshot_bytes, shape.slab_bytes, max(1, shape.slabs))
        landing = host_slabs(shape.slabs, shape.slab_bytes)
        transfer.register(MemoryRegion(FETCHED, landing, RegionRole.FETCHED))
        self.buffer = FetchBuffer(buffer_of(landing), shape)
        self.lessors = Lessors(own)
        self.wire = GrpcPeerWire(own, self.lessors, transfer, channels)
        self.source = PeerHostSource(self.wire, self.buffer, max_peers=max_peers)
        self.servicer = CachePeerServicer(tier, self.leases, transfer, own.signer)

    @property
    def service(self) -> tuple[Callable[[Any, Any], None], CachePeerServicer, Described]:
        """For ServiceServer.add."""
        described = cache_pb2.DESCRIPTOR.services_by_name["CachePeerService"]
        return cache_pb2_grpc.add_CachePeerServiceServicer_to_server, self.servicer, described

    def tasks(self, registry: Registry) -> list[Coroutine[Any, Any, None]]:
        """Background tasks: who is there, who is dead, which leases are over."""
        watches = [SenderWatch(role, self.peer_died) for role in (Role.PREFILL, Role.DECODE)]
        return [
            self.lessors.follow(registry),
            self._reap(),
            *(watch.follow(registry) for watch in watches),
            *(watch.examine() for watch in watches),
        ]

    async def peer_died(self, incarnation: str) -> None:
        """On evidence (L6): its leases end, and what it may have been writing is quiet."""
        self.leases.reader_died(incarnation)
        self.wire.lessor_died(incarnation)
        await asyncio.wrap_future(self._transfer.disconnect(incarnation))

    def add_metrics(self, metrics: Metrics) -> None:
        """Gauges of both sides."""
        metrics.gauge("host_leases", "Leases of the host tier that are out", lambda: self.leases.stats().live)
        metrics.gauge("host_leased_bytes", "Bytes pinned by leases", lambda: self.leases.stats().leased_bytes)
        metrics.gauge("peer_hits", "Entries read from peers' host tiers", lambda: self.source.stats().hits)
        metrics.gauge("peer_bytes", "Bytes read from peers' host tiers", lambda: self.source.stats().nbytes)
        metrics.gauge("peer_failures", "Calls and reads of peers that failed", lambda: self.source.stats().failures)
        metrics.gauges(
            "peer_misses",
            "Entries that peers did not bring, by cause",
            ("cause",),
            lambda: {(cause.value,): count for cause, count in self.source.stats().misses.items()},
        )
        metrics.gauge(
            "peer_quarantined_units",
            "Places of the buffer that a peer may still write",
            lambda: self.buffer.stats().quarantined,
        )

    def problems(self) -> tuple[str, ...]:
        """What an integrity check found (L11)."""
        stats = self.leases.stats()
        found = list(self.buffer.problems())
        if stats.granted != stats.live + stats.released + stats.expired + stats.bereaved:
            found.append(f"leases do not add up: {stats}")
        return tuple(found)

    async def _reap(self) -> None:
        while True:
            self.leases.expire()
            await asyncio.sleep(REAP_S)
