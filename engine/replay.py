"""Bounded replay as numbers: where consumers start, how long a cached prefix may be, where prefill chunks end.

Source: spec/protocol.md "Length and replay", spec/deepseek_v41.md §18. Everything follows from N₀ and K, which are
fixed at the request's first admission; so a recomputation or continuation, which knows more tokens, sees the same
windows.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.request import EngineRequest
from headrace.engine.settings import EngineSettings
from headrace.kvcache.layout import KVLayout


def default_keep_tokens(layout: KVLayout) -> int:
    """K where nobody says otherwise: window + 2 · backtracking (140 at full size)."""
    return layout.window + 2 * layout.backtracking


def least_keep_tokens(layout: KVLayout) -> int:
    """K may not be smaller than the ring: every ring position decode reads must have been written."""
    return layout.window + layout.backtracking


def end_snapshots(keep: int, block_tokens: int) -> int:
    """How many boundaries at the end of m tokens need a snapshot so that a longer prompt can reuse
    block · ⌊(m − K)/block⌋ of them: three at full size (spec/kv_tier.md), more where K spans more blocks."""
    return max(3, -(-keep // block_tokens) + 1)


@dataclass(frozen=True)
class ReplayPlan:
    """What N₀ and K decide for every computation of one request."""

    keep_from: int
    """N₀ − K, or 0 where the full model runs (StepBatch.keep_from)."""
    snapshot_positions: frozenset[int]
    """Prompt positions at which a snapshot is taken; a chunk ends at each, since the ring holds a boundary only for the
    next `backtracking` tokens."""
    decode_snapshots: int
    """Of the boundaries that decode crosses, the last so many keep their snapshot; 0 takes none."""
    reuse_limit: int | None
    """Largest usable cached prefix; None allows all but the last known token (layouts without snapshots)."""

    def largest_prefix(self, known: int, block_tokens: int) -> int:
        """Largest block multiple that may be taken from a cache when `known` tokens are known."""
        limit = known - 1 if self.reuse_limit is None else min(self.reuse_limit, known - 1)
        return max(limit, 0) // block_tokens * block_tokens


def plan_replay(request: EngineRequest, layout: KVLayout, settings: EngineSettings) -> ReplayPlan:
    """The plan of one request under a worker's settings."""
    if not layout.has_snapshots:
        return ReplayPlan(0, frozenset(), 0, None if settings.prefix_reuse else 0)
    if settings.replay == "off":
        return ReplayPlan(0, frozenset(), 0, 0)
    keep = request.keep_tokens or settings.keep_tokens or default_keep_tokens(layout)
    keep_from = max(request.prompt_length - keep, 0)
    if not settings.prefix_reuse:
        return ReplayPlan(keep_from, frozenset(), 0, 0)
    block, length = layout.block_tokens, request.prompt_length
    at_end = end_snapshots(keep, block)
    first = max((length // block - at_end + 1) * block, block)
    positions = set(range(first, length + 1, block)) | set(request.snapshot_at)
    if settings.snapshot_interval:
        interval = -(-settings.snapshot_interval // block) * block
        positions |= set(range(interval, length + 1, interval))
    return ReplayPlan(keep_from, frozenset(positions), at_end, keep_from)
