"""One replay of a trace against one policy, and what it measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.retention_harness.model import RECORD_BYTES, SegmentModel
from bench.retention_harness.peers import PEERS
from bench.retention_harness.trace import Request, Trace
from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.store.retention.classes import HOUR, expired

Progress = Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """A replay. Blocks and hits count leading blocks: what saves compute."""

    policy: str
    quota_blocks: int
    accesses: int
    hits: int
    write_amplification: float
    """Blocks written for each new one."""
    peak_quota_share: float
    """Largest share of the quota that the disk ever held, looked at after every write."""
    left_buckets: int = 0
    left_expired_buckets: int = 0
    evictions: int = 0
    evicted_blocks: int = 0
    expired_blocks: int = 0
    refreshed_blocks: int = 0
    rewritten_blocks: int = 0
    refused_blocks: int = 0
    stranded_peak: float = 0.0
    series: tuple[tuple[float, float], ...] = ()
    """(day, share of the quota in use), hourly."""

    @property
    def hit_ratio(self) -> float:
        return self.hits / max(self.accesses, 1)


def replay_store(
    requests: Iterable[Request],
    retention: RetentionClass,
    quota_blocks: int,
    *,
    start_s: float,
    idle_s: float = 0.0,
    refresh: bool = True,
    rewrite: float = 0.3,
    progress: Progress = lambda: None,
) -> Outcome:
    """The policies of the store, with a sweep each simulated hour, and `idle_s` without requests at the end."""
    store = SegmentModel(quota_blocks * RECORD_BYTES, refresh=refresh, rewrite=rewrite)
    keys: dict[int, bytes] = {}
    series: list[tuple[float, float]] = []
    now = swept = start_s
    accesses = hits = 0

    def sweep_until(time_s: float) -> None:
        nonlocal swept
        while swept + HOUR <= time_s:
            swept += HOUR
            store.sweep(swept)
            series.append(((swept - start_s) / 86_400, store.quota_share))

    for request in requests:
        now = start_s + request.time_s
        sweep_until(now)
        blocks = [keys.get(block) or keys.setdefault(block, block.to_bytes(8, "big")) for block in request.blocks]
        hits += store.request(blocks, retention, now)
        accesses += len(blocks)
        progress()
    now += idle_s
    sweep_until(now)
    store.sweep(now)
    if problems := store.problems():
        raise AssertionError(f"the ledger does not add up: {problems}")
    counts = store.counts
    return Outcome(
        policy="store",
        quota_blocks=quota_blocks,
        accesses=accesses,
        hits=hits,
        write_amplification=counts.write_amplification,
        peak_quota_share=counts.peak_bytes / store.quota.disk_bytes,
        left_buckets=len(store.bucket_ends()),
        left_expired_buckets=sum(expired(end, now) for end in store.bucket_ends()),
        evictions=counts.evictions,
        evicted_blocks=counts.evicted,
        expired_blocks=counts.expired,
        refreshed_blocks=counts.refreshed,
        rewritten_blocks=counts.rewritten,
        refused_blocks=counts.refused,
        stranded_peak=counts.stranded_peak,
        series=tuple(series),
    )


def replay_peer(policy: str, trace: Trace, capacity: int, progress: Progress = lambda: None) -> Outcome:
    """One of PEERS; it writes each block once."""
    peer = PEERS[policy](capacity)
    hits = 0
    for request in trace.requests:
        hits += peer.lead(request.blocks)
        peer.use(request.blocks)
        progress()
    return Outcome(policy, capacity, trace.accesses, hits, 1.0, 1.0)
