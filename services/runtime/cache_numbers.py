"""What a host tier and a store tell of themselves, in the wire's words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.kvcache.entries import Miss
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.store.base import Store, StoredEntry
from headrace.v1 import control_pb2


def host_stats(host: HostTier) -> control_pb2.TierStats:
    """Of the host tier."""
    stats = host.stats()
    return control_pb2.TierStats(
        tier=control_pb2.CACHE_TIER_HOST,
        blocks=stats.blocks,
        snapshots=stats.snapshots,
        bytes=stats.payload_bytes,
        capacity_bytes=stats.capacity_bytes,
        discarded=stats.bad,
        hits=stats.hits,
        misses=_by_cause(stats.misses),
        read_bytes=stats.read_bytes,
        written_bytes=stats.stored_bytes,
        evicted=stats.evicted_blocks + stats.evicted_snapshots,
        refused=_counts({"known": stats.known, "no_room": stats.no_room}),
        pinned=stats.pinned_entries,
    )


def store_stats(store: Store) -> control_pb2.TierStats:
    """Of a store; may ask its index."""
    stats = store.stats()
    return control_pb2.TierStats(
        tier=control_pb2.CACHE_TIER_STORE,
        blocks=stats.blocks,
        snapshots=stats.snapshots,
        bytes=stats.payload_bytes,
        capacity_bytes=stats.capacity_bytes,
        discarded=sum(stats.misses.get(cause, 0) for cause in (Miss.DIGEST, Miss.HEADER, Miss.HOLE, Miss.SHORT)),
        hits=stats.hits,
        misses=_by_cause(stats.misses),
        read_bytes=stats.read_bytes,
        written_bytes=stats.written_bytes,
        refreshed_bytes=stats.refreshed_bytes,
        evicted=stats.evicted_entries,
        expired=stats.expired_entries,
        refused=_counts({"full": stats.refused_full, "quota": stats.refused_quota, "known": stats.refused_known}),
        failed_writes=dict(stats.failed_writes),
        queued_entries=stats.queued_entries,
        queued_bytes=stats.queued_bytes,
        disk_bytes=stats.disk_bytes,
        index_bytes=stats.index_bytes,
        buckets=stats.buckets,
        segments=stats.segments,
        quarantined=stats.quarantined,
        store=store.identity(),
        sweeper=stats.sweeper,
    )


def store_place(row: StoredEntry) -> control_pb2.CachePlace:
    """What the index says of an entry."""
    return control_pb2.CachePlace(
        tier=control_pb2.CACHE_TIER_STORE,
        retention=row.retention.name.lower(),
        expires_unix_ms=0 if math.isinf(row.expires_at) else round(row.expires_at * 1000),
        bucket=row.bucket,
    )


def _by_cause(misses: Mapping[Miss, int]) -> dict[str, int]:
    return {cause.value: count for cause, count in misses.items() if count}


def _counts(named: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in named.items() if count}
