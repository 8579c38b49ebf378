"""Replicas' answers about one store as one: what they all see is told once, what each of them did is added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from headrace.v1 import control_pb2

T = TypeVar("T")
SIZES: Final = (
    "blocks",
    "snapshots",
    "bytes",
    "capacity_bytes",
    "disk_bytes",
    "index_bytes",
    "buckets",
    "segments",
    "pinned",
)
"""Of the store itself, as one replica tells them."""
COUNTS: Final = (
    "hit_tokens",
    "lookup_tokens",
    "discarded",
    "hits",
    "read_bytes",
    "written_bytes",
    "refreshed_bytes",
    "evicted",
    "expired",
    "queued_entries",
    "queued_bytes",
    "quarantined",
)
CAUSES: Final = ("misses", "refused", "failed_writes")


def merge_stats(tiers: Iterable[control_pb2.TierStats]) -> list[control_pb2.TierStats]:
    """Stores that several replicas share become one entry, where the first of them stood."""
    return [
        _one_store(group) if len(group) > 1 else group[0] for group in _by_store((tier, tier.store) for tier in tiers)
    ]


def merge_drops(drops: Iterable[control_pb2.TierDrop]) -> list[control_pb2.TierDrop]:
    """As `merge_stats`. Each replica counted what was left when it came, so the sum is what went."""
    return [
        control_pb2.TierDrop(
            tier=group[0].tier,
            blocks=sum(drop.blocks for drop in group),
            snapshots=sum(drop.snapshots for drop in group),
            store=group[0].store,
        )
        if len(group) > 1
        else group[0]
        for group in _by_store((drop, drop.store) for drop in drops)
    ]


def _by_store(items: Iterable[tuple[T, str]]) -> list[list[T]]:
    groups: list[list[T]] = []
    known: dict[str, list[T]] = {}
    for item, store in items:
        if store and store in known:
            known[store].append(item)
            continue
        groups.append([item])
        if store:
            known[store] = groups[-1]
    return groups


def _one_store(group: Sequence[control_pb2.TierStats]) -> control_pb2.TierStats:
    """Sizes are the sweeper's, which alone looks at the whole store again and again; without it, the largest."""
    tellers = [tier for tier in group if tier.sweeper] or group
    merged = control_pb2.TierStats(
        tier=group[0].tier,
        store=group[0].store,
        sharing=[tier.replica for tier in group],
        sweeper=any(tier.sweeper for tier in group),
        **{name: max(getattr(tier, name) for tier in tellers) for name in SIZES},
        **{name: sum(getattr(tier, name) for tier in group) for name in COUNTS},
    )
    for name in CAUSES:
        counts: Counter[str] = Counter()
        for tier in group:
            counts.update(getattr(tier, name))
        getattr(merged, name).update(counts)
    return merged
