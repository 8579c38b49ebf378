"""Gauges of a worker's cache tier: hits by tier, bytes, misses by cause, latencies, the write queue."""

from __future__ import annotations

from dataclasses import fields

from headrace.kvcache.cache_events import Tier
from headrace.kvcache.store.rebuild import Rebuilding, RebuildProgress, RebuildState
from headrace.kvcache.tier.stats import WriterStats
from headrace.services.runtime.cache_operations import TierTokens
from headrace.services.runtime.metrics import Metrics
from headrace.services.worker.tier.assembly import WorkerTier


def add_tier_metrics(metrics: Metrics, tier: WorkerTier) -> None:
    """Nothing for a worker without a tier."""
    loader, preloader, writer = tier.loader, tier.preloader, tier.writer
    if tier.peers is not None:
        tier.peers.add_metrics(metrics)
    if loader is not None:
        metrics.gauges(
            "tier_loads",
            "Loads since start, by outcome",
            ("outcome",),
            lambda: {(reason,): count for reason, count in loader.stats().loads.items()},
        )
        metrics.gauges(
            "tier_hit_tokens",
            "Prompt tokens brought into the device pool, by tier",
            ("tier",),
            lambda: {(name,): count for name, count in loader.stats().hit_tokens.items()},
        )
        metrics.gauges(
            "tier_loaded_bytes",
            "Bytes brought into the device pool, by tier",
            ("tier",),
            lambda: {(name,): count for name, count in loader.stats().nbytes.items()},
        )
        metrics.gauges(
            "tier_misses",
            "Entries that a tier did not bring although it was asked, by cause",
            ("tier", "cause"),
            lambda: {(name, cause): count for (name, cause), count in loader.stats().misses.items()},
        )
    store = tier.store
    if isinstance(store, Rebuilding):
        metrics.gauges(
            "tier_index_rebuild",
            "Refill of the store's index: rows read and added by the last one here, refills finished here since start, "
            "1 while one runs here or in another process, or has failed here",
            ("what",),
            lambda: rebuild_figures(store.rebuild),
        )
    if preloader is not None:
        seconds = metrics.histogram("tier_load_seconds", "Time that requests waited for the tier", ("outcome",))
        preloader.observe = lambda outcome, spent: seconds.labels(outcome).observe(spent)
    if writer is not None:
        names = tuple(field.name for field in fields(WriterStats))
        metrics.gauges(
            "tier_writes",
            "What became of entries offered to the tier since start, and what waits (queued, in_flight)",
            ("what",),
            lambda: {(name,): float(getattr(writer.stats(), name)) for name in names},
        )


def rebuild_figures(progress: RebuildProgress) -> dict[tuple[str], float]:
    """Figures of a refill, by label."""
    figures = {"rows": progress.rows, "added": progress.added, "finished": progress.rebuilds}
    states = (RebuildState.RUNNING, RebuildState.ELSEWHERE, RebuildState.FAILED)
    figures |= {state.value: int(progress.state is state) for state in states}
    return {(what,): float(figure) for what, figure in figures.items()}


def tier_tokens(tier: WorkerTier) -> dict[Tier, TierTokens]:
    """Prompt tokens that each tier below the device pool served, for operators."""
    if tier.loader is None:
        return {}
    stats = tier.loader.stats()
    hits, asked = stats.hit_tokens, stats.asked_tokens
    return {
        Tier.HOST: TierTokens(hit=hits["host"] + hits["peer"], looked_up=asked),
        Tier.STORE: TierTokens(hit=hits["store"], looked_up=asked),
    }
