"""Gauges of what the router knows of prefixes."""

from __future__ import annotations

from headrace.services.router.prefixes import Prefixes
from headrace.services.runtime.metrics import Metrics


def add_prefix_metrics(metrics: Metrics, prefixes: Prefixes) -> None:
    """All of them read the objects themselves (L11)."""
    index, feed, view, lookup = prefixes.index, prefixes.feed, prefixes.view, prefixes.lookup
    metrics.gauge("prefix_index_entries", "Pairs of key and holder in the prefix index", lambda: index.entries)
    metrics.gauge("prefix_index_keys", "Blocks and snapshots in the prefix index", lambda: index.keys)
    metrics.gauge("prefix_index_bytes", "Memory of the prefix index", lambda: index.nbytes)
    metrics.gauge("prefix_index_forgotten", "Keys forgotten for want of memory since start", lambda: index.forgotten)
    metrics.gauge("cache_feed_sources", "Workers whose cache events are followed", lambda: feed.sources)
    metrics.gauge("cache_feed_lost", "Workers of which a snapshot is wanted", lambda: feed.lost)
    metrics.gauge("cache_feed_events", "Cache events applied since start", lambda: feed.counts().applied)
    metrics.gauge("cache_feed_keys", "Keys in applied cache events since start", lambda: feed.counts().keys)
    metrics.gauge("cache_feed_repeated", "Cache events that had been applied before", lambda: feed.counts().repeated)
    metrics.gauge("cache_feed_foreign", "Cache events of former lives of workers", lambda: feed.counts().foreign)
    metrics.gauge("cache_feed_gaps", "Times that cache events were found missing", lambda: feed.counts().gaps)
    metrics.gauge("cache_feed_snapshots", "Cache snapshots taken since start", lambda: feed.counts().snapshots)
    metrics.gauges(
        "cache_feed_failures",
        "Streams of cache events that ended, by status",
        ("status",),
        lambda: {(status,): count for status, count in feed.failures.items()},
    )
    metrics.gauges(
        "prefix_hints",
        "What prefill found of what its events had promised: right, evicted meanwhile, wrong",
        ("found",),
        lambda: {(found,): count for found, count in prefixes.hints.items()},
    )
    metrics.gauge("store_view_keys", "Keys whose presence in the store is remembered", lambda: len(view))
    metrics.gauges(
        "store_view_unknown",
        "Requests whose prefix in the store was not known in time, by cause",
        ("cause",),
        lambda: {(cause,): count for cause, count in prefixes.store_misses.items()},
    )
    if lookup is not None:
        metrics.gauge("store_lookups", "Calls of the store's index since start", lambda: lookup.calls)
        metrics.gauge("store_lookup_keys", "Keys asked of the store's index since start", lambda: lookup.keys)
        metrics.gauges(
            "store_lookup_misses",
            "Calls of the store's index without an answer, by cause",
            ("cause",),
            lambda: {(cause,): count for cause, count in lookup.unanswered.items()},
        )
