"""The cache calls of ControlService as a process takes them, and the tiers that it answers them for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from headrace.kvcache.cache_events import Tier
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import Store
from headrace.v1 import control_pb2

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]


class CacheOperations(Protocol):
    """The cache calls, request to response. `metadata` is the call's, for who has to know the caller."""

    async def clear(
        self, request: control_pb2.ClearCacheRequest, metadata: Metadata
    ) -> control_pb2.ClearCacheResponse: ...

    async def stats(
        self, request: control_pb2.CacheStatsRequest, metadata: Metadata
    ) -> control_pb2.CacheStatsResponse: ...

    async def find(
        self, request: control_pb2.FindCacheRequest, metadata: Metadata
    ) -> control_pb2.FindCacheResponse: ...

    async def pin(self, request: control_pb2.PinCacheRequest, metadata: Metadata) -> control_pb2.PinCacheResponse: ...

    def verify(
        self, request: control_pb2.VerifyCacheRequest, metadata: Metadata
    ) -> AsyncIterator[control_pb2.VerifyCacheResponse]: ...

    async def collect(
        self, request: control_pb2.CollectCacheRequest, metadata: Metadata
    ) -> control_pb2.CollectCacheResponse: ...


class DevicePrefixes(Protocol):
    """The device pool's prefixes, whose engine answers between two steps."""

    async def stats(self) -> control_pb2.TierStats:
        """Sizes and counters of tier DEVICE."""
        ...

    async def forget(self) -> tuple[int, int]:
        """Unbind everything; blocks and snapshots that could be found before."""
        ...

    async def find(self, blocks: Sequence[Key], snapshots: Sequence[Key]) -> tuple[Sequence[bool], Sequence[bool]]:
        """Which are there."""
        ...


@dataclass(frozen=True)
class TierTokens:
    """Prompt tokens since start."""

    hit: int = 0
    """Served from the tier."""
    looked_up: int = 0
    """Asked of it."""


def no_tokens() -> Mapping[Tier, TierTokens]:
    """Nobody counts."""
    return {}


@dataclass(frozen=True)
class CacheControls:
    """The tiers of one process; None where it has none."""

    device: DevicePrefixes | None = None
    host: HostTier | None = None
    store: Store | None = None
    tokens: Callable[[], Mapping[Tier, TierTokens]] = field(default=no_tokens)
    settled: Callable[[], bool] = lambda: True
    """Nothing waits to be copied from the device pool to the tiers below, where it would come after a drop."""
