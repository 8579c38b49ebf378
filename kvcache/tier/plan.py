"""Which prefix to fetch: pure decisions over what the pool has and what the sources say they have.

A prefix of P tokens is usable only as a whole (L4): every block of [0, P) and, where the layout has them, the snapshot
at P. A twin that tries every P stands in the tests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.kvcache.keys import Key, snapshot_key
from headrace.kvcache.layout import KVLayout


@dataclass(frozen=True)
class Wanted:
    """The largest prefix that a request may reuse, and what the device pool has of it: the engine's answer to
    BeginLoad."""

    keys: tuple[Key, ...]
    """Of its blocks."""
    present: tuple[bool, ...]
    """Blocks in the pool; these are held for the load."""
    snapshots: tuple[int, ...]
    """Positions whose snapshot is in the pool and held for the load, ascending: the largest usable now, and the largest
    of all."""
    usable_tokens: int
    """What could be reused without fetching."""
    room_blocks: int
    """Blocks that the pool takes at most; later ones would be refused."""


@dataclass(frozen=True)
class FetchPlan:
    """What makes [0, tokens) usable."""

    tokens: int
    blocks: tuple[int, ...] = ()
    """Indexes of blocks to fetch, ascending."""
    snapshot: int | None = None
    """Position of the snapshot to fetch; None: there is none, or the pool has it."""

    def nbytes(self, layout: KVLayout) -> int:
        return len(self.blocks) * layout.block_bytes + (layout.snapshot_bytes if self.snapshot is not None else 0)


def plan_fetch(
    wanted: Wanted, layout: KVLayout, found: Collection[int], snapshots: Collection[int], reached: int | None = None
) -> FetchPlan:
    """The largest usable prefix beyond `wanted.usable_tokens`.

    found: indexes of blocks that some source has; snapshots: positions at which some source has one. reached: blocks
    [0, reached) alone may be used, since the rest did not come in time. FetchPlan(usable_tokens) when nothing gains.
    """
    blocks = layout.block_tokens
    missing: list[int] = []
    contiguous = 0
    for index, present in enumerate(wanted.present[:reached]):
        if not present:
            if index not in found or len(missing) == wanted.room_blocks:
                break
            missing.append(index)
        contiguous = index + 1
    end = contiguous * blocks
    if layout.has_snapshots:
        usable = [position for position in (*wanted.snapshots, *snapshots) if position <= end]
        end = max(usable, default=0)
    if end <= wanted.usable_tokens:
        return FetchPlan(wanted.usable_tokens)
    fetched = layout.has_snapshots and end not in wanted.snapshots
    return FetchPlan(end, tuple(index for index in missing if index < end // blocks), end if fetched else None)


def snapshot_keys(keys: Sequence[Key], layout: KVLayout) -> tuple[Key, ...]:
    """Key of the snapshot at the end of each block."""
    return tuple(snapshot_key(key, layout.ring_tokens) for key in keys)


def pays(plan: FetchPlan, usable_tokens: int, seconds: float | None, token_seconds: float | None, least: int) -> bool:
    """Break-even (spec/kv_tier.md): fetch only if it is quicker than computing, and not below `least` tokens.

    seconds: expected time of the fetch; token_seconds: measured time to compute one prompt token. What nobody has
    measured yet is tried.
    """
    gain = plan.tokens - usable_tokens
    if gain <= 0 or gain < least:
        return False
    return seconds is None or token_seconds is None or seconds < gain * token_seconds
