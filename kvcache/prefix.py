"""Prefix reuse inside one pool: which leading part of a prompt need not be computed again (L4).

A prefix of P tokens is usable only as a whole: all blocks of [0, P) and, for layouts with snapshots, the snapshot at P.
Keys are SHA-256 chains over everything a row depends on (keys.py), so equal keys mean equal bytes and token ids are not
compared again; pools that index by short hashes must.

A request holds (references) what it was given until it releases it, so nothing that is read is evicted. Rows are
released in prefix order, which puts suffixes first in the eviction order: plain LRU then never strands a suffix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.kvcache.cache_events import Cleared, EventSink, Removed, Stored, Tier, ignore_events
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.keys import Key, snapshot_key
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.pool import KVPool, OutOfSnapshots
from headrace.kvcache.region import Owner, PoolError


@dataclass(frozen=True)
class PrefixMatch:
    """The longest usable prefix that the pool holds."""

    tokens: int
    """P: a multiple of block_tokens; 0 when nothing is usable."""
    rows: tuple[int, ...]
    """Pool row of each block of [0, P)."""
    snapshot: int | None
    """Snapshot place at P; None for layouts without snapshots and when tokens is 0."""


def reuse_limit(layout: KVLayout, prompt_tokens: int, keep_tokens: int) -> int:
    """Largest P at which a cached prefix may end for a prompt of N₀ = prompt_tokens.

    V4.1: N₀ − K, since bounded replay recomputes the last K = keep_tokens (spec §18.4); replay off disables reuse, the
    caller then asks for nothing. Layouts without snapshots: N₀ − 1, one token must be computed to have logits.
    """
    limit = prompt_tokens - keep_tokens if layout.has_snapshots else prompt_tokens - 1
    return max(limit, 0)


class PrefixCache:
    """Keyed rows and snapshots of one pool. Used by the engine thread that owns the pool."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.layout = pool.layout
        self._tell: EventSink = ignore_events

    def announce_to(self, sink: EventSink) -> None:
        """Tell every later change of what is findable here (L24): called on the engine's thread."""

        def removed(kind: EntryKind) -> Callable[[tuple[Key, ...]], None]:
            return lambda keys: sink(Removed(kind, Tier.DEVICE, keys))

        self._tell = sink
        self.pool.row_region.on_removed = removed(EntryKind.BLOCK)
        self.pool.snapshot_region.on_removed = removed(EntryKind.SNAPSHOT)

    def lookup(self, keys: Sequence[Key], limit: int) -> PrefixMatch:
        """Longest usable prefix with P ≤ limit tokens, changing nothing. ``keys`` are the prompt's full blocks'.

        V4.1: the largest P that has a snapshot and whose blocks are all there. V3: every block boundary.
        """
        block_tokens = self.layout.block_tokens
        rows = self._leading_rows(keys, max(limit, 0) // block_tokens)
        if not self.layout.has_snapshots:
            return PrefixMatch(len(rows) * block_tokens, tuple(rows), None)
        for count in range(len(rows), 0, -1):
            place = self.find_snapshot(keys[count - 1])
            if place is not None:
                return PrefixMatch(count * block_tokens, tuple(rows[:count]), place)
        return PrefixMatch(0, (), None)

    def acquire(self, keys: Sequence[Key], limit: int, owner: Owner) -> PrefixMatch:
        """lookup(), and hold rows and snapshot for ``owner``.

        The owner restores the snapshot into its slot and then calls ``pool.release_snapshot``; rows are released with
        the rest of its block table.
        """
        match = self.lookup(keys, limit)
        self.pool.hold_rows(match.rows, owner)
        if match.snapshot is not None:
            self.pool.snapshot_region.hold((match.snapshot,), owner)
        return match

    def acquire_blocks(self, keys: Sequence[Key], owner: Owner, max_blocks: int | None = None) -> tuple[int, ...]:
        """Hold the leading blocks that are here, snapshot or not (decode's answer to Reserve: the slot is sent)."""
        rows = tuple(self._leading_rows(keys, len(keys) if max_blocks is None else max_blocks))
        self.pool.hold_rows(rows, owner)
        return rows

    def commit(
        self, keys: Sequence[Key], rows: Sequence[int], owner: Owner, *, parent: Key | None = None, first_block: int = 0
    ) -> tuple[int, ...]:
        """Name rows of ``owner`` whose 128 positions are all computed; returns the canonical row of each key.

        ``parent`` is the key before the first one (the root's for ``first_block`` 0): what events tell, no more.

        Where a key is present already in another row, that row stays the one, the owner's reference moves to it and the
        duplicate is released (it drains while a push pins it): the caller puts the returned rows into its block table.
        Committing a row again under its own key is allowed. Call it between steps, when no kernel in flight reads rows.

        Raises:
            PoolError: lengths differ. NotHeld: owner does not hold a row. KeyConflict: a row has another key.
        """
        if len(keys) != len(rows):
            raise PoolError(f"commit: {len(keys)} keys for {len(rows)} rows")
        region = self.pool.row_region
        canonical: list[int] = []
        fresh: list[int] = []
        for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
            present = region.find(key)
            if present is None or present == row:
                region.set_key(row, key, owner)
                canonical.append(row)
                if present is None:
                    fresh.append(index)
                continue
            if row not in region.held_by(owner):
                raise PoolError(f"commit: {owner} does not hold row {row}")
            region.hold((present,), owner)
            region.release((row,), owner)
            canonical.append(present)
        self._tell_stored(keys, fresh, parent, first_block)
        return tuple(canonical)

    def _tell_stored(self, keys: Sequence[Key], fresh: Sequence[int], parent: Key | None, first_block: int) -> None:
        """One event per run of keys that were not here before."""
        begin = 0
        for at, index in enumerate(fresh):
            if at + 1 < len(fresh) and fresh[at + 1] == index + 1:
                continue
            first = fresh[begin]
            self._tell(
                Stored(
                    EntryKind.BLOCK,
                    Tier.DEVICE,
                    tuple(keys[first : index + 1]),
                    keys[first - 1] if first else parent,
                    (first_block + index + 1) * self.layout.block_tokens,
                    self.layout.block_bytes,
                )
            )
            begin = at + 1

    def commit_snapshot(self, block_key: Key, slot: int, *, end_tokens: int = 0) -> bool:
        """Keep a snapshot of ``slot`` (its window must end at the end of ``block_key``'s block). True when it is kept.
        ``end_tokens`` is that position: what events tell, no more.

        Snapshots are an optimisation: without a free or evictable place the answer is False. Present already: touched,
        True. Layouts without snapshots: False.
        """
        if not self.layout.has_snapshots:
            return False
        region = self.pool.snapshot_region
        key = snapshot_key(block_key, self.layout.ring_tokens)
        present = region.find(key)
        if present is not None:
            region.touch((present,))
            return True
        owner = f"snapshot:{key.hex()}"
        try:
            place = self.pool.take_snapshot(slot, owner)
        except OutOfSnapshots:
            return False
        region.set_key(place, key, owner)
        region.release((place,), owner)
        self._tell(Stored(EntryKind.SNAPSHOT, Tier.DEVICE, (key,), None, end_tokens, self.layout.snapshot_bytes))
        return True

    def adopt_block(self, key: Key, payload: bytes | memoryview, owner: Owner, *, parent: Key | None, end: int) -> None:
        """Take a verified block from a tier into a row held by ``owner``; ``parent`` and ``end`` (position) are for
        events. Raises OutOfRows."""
        row = self.pool.fill_row(payload, owner)
        self.pool.row_region.set_key(row, key, owner)
        self._tell(Stored(EntryKind.BLOCK, Tier.DEVICE, (key,), parent, end, self.layout.block_bytes))

    def adopt_snapshot(self, key: Key, payload: bytes | memoryview, owner: Owner, *, end: int) -> None:
        """The same for a snapshot, under its own key. Raises OutOfSnapshots."""
        place = self.pool.fill_snapshot(payload, owner)
        self.pool.snapshot_region.set_key(place, key, owner)
        self._tell(Stored(EntryKind.SNAPSHOT, Tier.DEVICE, (key,), None, end, self.layout.snapshot_bytes))

    def find_snapshot(self, block_key: Key) -> int | None:
        """Place of the snapshot at the end of ``block_key``'s block, or None."""
        return self.pool.snapshot_region.find(snapshot_key(block_key, self.layout.ring_tokens))

    def forget(self, block_key: Key) -> None:
        """Unbind a block and its snapshot whose bytes proved bad (L3). Holders of the row are not disturbed."""
        self.pool.row_region.forget(block_key)
        if self.layout.has_snapshots:
            self.pool.snapshot_region.forget(snapshot_key(block_key, self.layout.ring_tokens))

    def forget_all(self) -> tuple[int, int]:
        """Unbind every block and snapshot, held ones too (an operator erases); returns how many of each there were."""
        count = self.pool.row_region.forget_all(), self.pool.snapshot_region.forget_all()
        self._tell(Cleared(Tier.DEVICE))
        return count

    def count(self) -> tuple[int, int]:
        """Blocks and snapshots that can be found."""
        return self.pool.row_region.named, self.pool.snapshot_region.named

    def clear(self) -> int:
        """Drop everything cached that nobody pins; returns how many rows and snapshots went."""
        return self.pool.row_region.clear_cached() + self.pool.snapshot_region.clear_cached()

    def _leading_rows(self, keys: Sequence[Key], max_blocks: int) -> list[int]:
        rows: list[int] = []
        for key in keys[:max_blocks]:
            row = self.pool.row_region.find(key)
            if row is None:
                break
            rows.append(row)
        return rows
