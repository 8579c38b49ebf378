"""Replay R: rows in the order of the trace, every worker's cache known at once, no time but the trace's windows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.routing_harness.plain import Lru
from headrace.router.balancers.base import PrefillBalancer
from headrace.router.cost.loading import LoadingRates
from headrace.router.cost.prefill import FixedPrefillCost
from headrace.router.fleet import Fleet
from headrace.router.index.base import HolderTier, PrefixIndex
from headrace.router.ranks import RankNumbers
from headrace.router.request import RoutingRequest
from headrace.router.simulate.traces import Trace
from headrace.router.topology import Candidate, RankId, Role

WINDOW_S = 60.0
MANY = 1 << 40
COSTS = FixedPrefillCost(token_s=1.0)
"""A block is the unit of everything here: one token of one second."""
RATES = LoadingRates()

Progress = Callable[[], None]
MakePolicy = Callable[[Fleet], PrefillBalancer]
MakeIndex = Callable[[int], PrefixIndex]


@dataclass(frozen=True)
class Outcome:
    """One replay."""

    hit_ratio: float
    """Leading blocks present on the chosen worker ÷ all blocks."""
    imbalance: float
    """max ÷ mean over workers of blocks not hit."""
    imbalance_60s_mean: float
    imbalance_60s_p95: float
    attention_imbalance: float
    """The same of Σ new · (hit + new/2)."""
    busiest_share: float
    """Of all requests."""


def keys_of(trace: Trace) -> list[tuple[bytes, ...]]:
    """A 32-byte key for each block id, spread as digests are."""
    ids = {block for row in trace.rows for block in row.blocks}
    made = {block: hashlib.sha256(block.to_bytes(8, "little")).digest() for block in ids}
    return [tuple(made[block] for block in row.blocks) for row in trace.rows]


def replay(
    trace: Trace,
    keys: Sequence[tuple[bytes, ...]],
    workers: int,
    capacity: int | None,
    make_policy: MakePolicy,
    make_index: MakeIndex,
    progress: Progress = lambda: None,
) -> Outcome:
    """`capacity`: blocks that each worker holds, None for any number."""
    fleet = Fleet(RankNumbers(), half_life_s=None)
    names = [RankId(f"worker-{worker:03}", "1") for worker in range(workers)]
    for name in names:
        fleet.put(name.replica_id, "1", [Candidate(name, Role.PREFILL, "dc", "host", MANY, 0, 1, MANY)])
    policy, index = make_policy(fleet), make_index(workers)
    caches = [Lru(capacity) for _ in names]
    chosen: npt.NDArray[np.int64] = np.zeros(len(keys), np.int64)
    hits: npt.NDArray[np.int64] = np.zeros(len(keys), np.int64)
    for at, (row, blocks) in enumerate(zip(trace.rows, keys, strict=True)):
        request = RoutingRequest(
            request_id=str(at),
            prompt_tokens=len(blocks),
            max_tokens=1,
            choices=1,
            image_tokens=0,
            affinity_key=blocks[0],
            deadline=float(MANY),
            blocks=blocks,
            usable_tokens=len(blocks),
        )
        match = index.match(blocks, None, len(blocks))
        choice = next(policy.order(request, match, row.at_s))
        worker = fleet.numbers.take(choice.rank.id)
        # It never ends: without time no rank is ever idle.
        fleet.begin(choice.rank.id, request.request_id, choice.prediction.amount, row.at_s)
        chosen[at] = worker
        hits[at] = caches[worker].lead(blocks)
        came, left = caches[worker].use(blocks)
        if left:
            index.removed(worker, HolderTier.DEVICE, left)
        index.stored(worker, HolderTier.DEVICE, came)
        progress()
    sizes = np.array([len(blocks) for blocks in keys], np.int64)
    return measure(np.array([row.at_s for row in trace.rows]), sizes, hits, chosen, workers)


def measure(
    at_s: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.int64],
    hits: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.int64],
    workers: int,
) -> Outcome:
    """The figures, from one row a request."""
    work = sizes - hits
    windows = (at_s // WINDOW_S).astype(np.int64)
    table = np.zeros((int(windows.max()) + 1, workers))
    np.add.at(table, (windows, chosen), work)
    busy = table[table.sum(axis=1) > 0]
    ratios = busy.max(axis=1) / busy.mean(axis=1)
    attention = np.bincount(chosen, work * (hits + work / 2), workers)
    total = table.sum(axis=0)
    return Outcome(
        hit_ratio=float(hits.sum() / sizes.sum()),
        imbalance=float(total.max() / total.mean()),
        imbalance_60s_mean=float(ratios.mean()),
        imbalance_60s_p95=float(np.percentile(ratios, 95)),
        attention_imbalance=float(attention.max() / attention.mean()),
        busiest_share=float(np.bincount(chosen, minlength=workers).max() / len(chosen)),
    )


def ceiling(trace: Trace, capacity: int | None = None) -> float:
    """Hit ratio of one cache for all."""
    cache, hits = Lru(capacity), 0
    for row in trace.rows:
        blocks = [block.to_bytes(8, "little") for block in row.blocks]
        hits += cache.lead(blocks)
        cache.use(blocks)
    return hits / trace.accesses
