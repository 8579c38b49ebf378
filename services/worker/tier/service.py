"""What a worker serves of its caches: events, metrics, peers' reads, and the calls of operators."""

from __future__ import annotations

from functools import partial

from headrace.kvcache.event_log import EventLog
from headrace.kvcache.layout import KVLayout
from headrace.services.runtime.cache_control import ProcessCaches
from headrace.services.runtime.cache_metrics import add_cache_metrics
from headrace.services.runtime.cache_operations import CacheControls
from headrace.services.runtime.process import ServiceProcess
from headrace.services.worker.device_prefixes import EnginePrefixes
from headrace.services.worker.engine_link import EngineLink
from headrace.services.worker.events_service import add_event_service
from headrace.services.worker.tier.assembly import WorkerTier
from headrace.services.worker.tier.metrics import add_tier_metrics, tier_tokens


def serve_caches(
    process: ServiceProcess, tier: WorkerTier, link: EngineLink, layout: KVLayout, events: EventLog
) -> ProcessCaches:
    """Add all of it to the process's server and metrics, before the server opens; answers what operators call.

    `events`: of the device pool and the host tier; the store has a log of its own."""
    watched = add_event_service(process.server, events, tier.store_events)
    process.metrics.gauge("cache_event_watchers", "Readers of cache events", lambda: watched.watchers)
    process.metrics.gauge("cache_events", "Cache events since start", lambda: events.last_sequence)
    add_tier_metrics(process.metrics, tier)
    tier.serve(process.server)
    controls = CacheControls(
        device=EnginePrefixes(link, layout),
        host=tier.host,
        store=tier.store,
        tokens=partial(tier_tokens, tier),
        settled=lambda: tier.writer is None or tier.writer.idle,
    )
    add_cache_metrics(process.metrics, controls)
    return ProcessCaches(controls)
