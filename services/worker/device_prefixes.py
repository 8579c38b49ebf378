"""The device pool's prefixes for operators: commands to the engine thread (services/runtime/cache_control.py)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.cache_messages import CountPrefixes, FindPrefixes, ForgetPrefixes
from headrace.engine.messages import GetStatus
from headrace.kvcache.keys import Key
from headrace.kvcache.layout import KVLayout
from headrace.services.worker.engine_link import EngineLink
from headrace.v1 import control_pb2


class EnginePrefixes:
    """DevicePrefixes of one engine."""

    def __init__(self, link: EngineLink, layout: KVLayout) -> None:
        self._link = link
        self._layout = layout

    async def stats(self) -> control_pb2.TierStats:
        """Findable entries, and what the pool could hold."""
        held = await self._link.call(CountPrefixes())
        status = await self._link.call(GetStatus())
        pools = {pool.name: pool for pool in status.pools}
        layout = self._layout
        sizes = (("rows", layout.block_bytes), ("snapshots", layout.snapshot_bytes))
        return control_pb2.TierStats(
            tier=control_pb2.CACHE_TIER_DEVICE,
            blocks=held.blocks,
            snapshots=held.snapshots,
            bytes=held.blocks * layout.block_bytes + held.snapshots * layout.snapshot_bytes,
            capacity_bytes=sum(pools[name].total * size for name, size in sizes if name in pools),
            pinned=sum(pools[name].pinned for name, _ in sizes if name in pools),
        )

    async def forget(self) -> tuple[int, int]:
        """See DevicePrefixes."""
        gone = await self._link.call(ForgetPrefixes())
        return gone.blocks, gone.snapshots

    async def find(self, blocks: Sequence[Key], snapshots: Sequence[Key]) -> tuple[Sequence[bool], Sequence[bool]]:
        """See DevicePrefixes."""
        return await self._link.call(FindPrefixes(tuple(blocks), tuple(snapshots)))
