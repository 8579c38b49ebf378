"""Gauges of what the host tier and the store hold and do, for every process that has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from headrace.services.runtime.cache_numbers import host_stats, store_stats
from headrace.services.runtime.cache_operations import CacheControls
from headrace.services.runtime.metrics import Metrics
from headrace.v1 import control_pb2

FRESH_SECONDS: Final = 1.0
"""Statistics are asked for once per scrape, not once per series: a store may have to ask its index."""


def add_cache_metrics(metrics: Metrics, controls: CacheControls, clock: Callable[[], float] = time.monotonic) -> None:
    """Nothing for a process without these tiers."""
    tiers: dict[str, Callable[[], control_pb2.TierStats]] = {}
    if controls.host is not None:
        host = controls.host
        tiers["host"] = lambda: host_stats(host)
    if controls.store is not None:
        store = controls.store
        tiers["store"] = lambda: store_stats(store)
    if not tiers:
        return
    taken: dict[str, tuple[float, control_pb2.TierStats]] = {}

    def stats() -> Mapping[str, control_pb2.TierStats]:
        now = clock()
        for name, read in tiers.items():
            if name not in taken or now - taken[name][0] >= FRESH_SECONDS:
                taken[name] = (now, read())
        return {name: one for name, (_, one) in taken.items()}

    def of(*fields: str) -> Callable[[], dict[tuple[str, ...], float]]:
        if len(fields) == 1:
            return lambda: {(name,): float(getattr(one, fields[0])) for name, one in stats().items()}
        return lambda: {(name, field): float(getattr(one, field)) for name, one in stats().items() for field in fields}

    def causes(field: str) -> Callable[[], dict[tuple[str, ...], float]]:
        return lambda: {
            (name, cause): float(count) for name, one in stats().items() for cause, count in getattr(one, field).items()
        }

    metrics.gauges("cache_entries", "Entries held, by tier and kind", ("tier", "kind"), of("blocks", "snapshots"))
    metrics.gauges("cache_bytes", "Payload bytes held", ("tier",), of("bytes"))
    metrics.gauges(
        "cache_capacity_bytes", "Bytes that may be held; 0 no limit of its own", ("tier",), of("capacity_bytes")
    )
    metrics.gauges("cache_hits", "Entries read and verified since start", ("tier",), of("hits"))
    metrics.gauges("cache_misses", "Reads without a usable entry, by cause", ("tier", "cause"), causes("misses"))
    metrics.gauges("cache_read_bytes", "Payload bytes read since start", ("tier",), of("read_bytes"))
    metrics.gauges("cache_written_bytes", "Payload bytes written since start", ("tier",), of("written_bytes"))
    metrics.gauges(
        "cache_gone", "Entries that left since start", ("tier", "why"), of("evicted", "expired", "discarded")
    )
    metrics.gauges("cache_refused", "Entries not taken, by cause", ("tier", "cause"), causes("refused"))
    if controls.store is None:
        return

    def of_store(field: str) -> Callable[[], float]:
        return lambda: float(getattr(stats()["store"], field))

    metrics.gauge("store_queue_entries", "Entries that wait to be written", of_store("queued_entries"))
    metrics.gauge("store_queue_bytes", "Bytes that wait to be written", of_store("queued_bytes"))
    metrics.gauge("store_refreshed_bytes", "Bytes written again to live on", of_store("refreshed_bytes"))
    metrics.gauge("store_disk_bytes", "Bytes on disk", of_store("disk_bytes"))
    metrics.gauge("store_index_bytes", "Bytes of the index", of_store("index_bytes"))
    metrics.gauge("store_segments", "Segments or volumes", of_store("segments"))
    metrics.gauge("store_quarantined", "Records that are read no more", of_store("quarantined"))
    metrics.gauges("store_failed_writes", "Writes that failed, by cause", ("tier", "cause"), causes("failed_writes"))
