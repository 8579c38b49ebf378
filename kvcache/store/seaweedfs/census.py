"""How much is stored, as the index and the masters tell."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from headrace.kvcache.entries import EntryKind
from headrace.kvcache.index.base import Index, IndexUnavailable
from headrace.kvcache.store.seaweedfs.cluster import Cluster, ClusterError
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.segments.names import bucket_name

_COUNT_AT_ONCE = 10_000
"""Rows that are counted whenever somebody asks; larger indexes are counted once per sweep, since it reads all rows."""


@dataclass(frozen=True)
class Sizes:
    """Zeros if the index does not answer; without a master, disk_bytes is what the index knows of."""

    blocks: int = 0
    snapshots: int = 0
    payload_bytes: int = 0
    disk_bytes: int = 0
    index_bytes: int = 0
    buckets: int = 0
    volumes: int = 0


class Census:
    """Thread-safe."""

    def __init__(self, settings: SeaweedSettings, index: Index, cluster: Cluster) -> None:
        self._settings = settings
        self._index = index
        self._cluster = cluster
        self._lock = threading.Lock()
        self._last = Sizes()
        self._stale_at = 0.0

    def sizes(self) -> Sizes:
        """The last count if the index is large and the count not older than a sweep, else a new one."""
        with self._lock:
            if time.monotonic() >= self._stale_at:
                try:
                    self._last = self._count()
                except IndexUnavailable:
                    self._last = Sizes()
                entries = self._last.blocks + self._last.snapshots
                self._stale_at = time.monotonic() + self._settings.sweep_s if entries > _COUNT_AT_ONCE else 0.0
            return self._last

    def _count(self) -> Sizes:
        blocks = snapshots = payload = 0
        groups = self._index.groups(self._deadline())
        for group in groups:
            for row in self._index.rows_of(group, self._deadline()):
                snapshots += row.kind is EntryKind.SNAPSHOT
                blocks += row.kind is EntryKind.BLOCK
                payload += row.length
        try:
            volumes = self._cluster.volumes(self._deadline())
        except ClusterError:
            volumes = ()
        # Masters hear of growth with the next heartbeat; at least what the index knows of is on every copy.
        told = sum(volume.nbytes * volume.copies for volume in volumes)
        return Sizes(
            blocks=blocks,
            snapshots=snapshots,
            payload_bytes=payload,
            disk_bytes=max(told, payload * self._settings.copies),
            index_bytes=self._index.stats(self._deadline()).nbytes,
            buckets=len({bucket_name(group) for group in groups}),
            volumes=len(volumes),
        )

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.index_timeout_s
