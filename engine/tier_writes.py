"""What the tier is to keep of what was computed here: blocks as they get their names, snapshots as they are taken.

Places are pinned from the offer until the tier has copied them, and pins are bounded: what finds no room waits with its
sequence, prefix first, and is offered again when a copy is made. What still waits when the sequence ends is dropped,
suffix first by construction, and counted. The engine never waits for the tier.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.marks import stream_mark
from headrace.engine.reports import WriteCounts
from headrace.engine.request import TrafficClass
from headrace.engine.sequence import Sequence, State
from headrace.engine.tier_messages import CacheScope, OfferPrefix, TierSink, TierWrite, WriteRow
from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.keys import Key, snapshot_key
from headrace.kvcache.pool import KVPool
from headrace.kvcache.region import NotPinned, Region

RETENTION = {TrafficClass.AGENT: RetentionClass.AGENT, TrafficClass.CHAT: RetentionClass.CHAT}
"""BATCH reads and never writes (spec/kv_tier.md, Retention)."""
LEAST_SNAPSHOTS = 3
"""Snapshots that may be pinned at once however small the pool is: those of one prompt's end."""


class TierWrites:
    """Used by the engine thread only."""

    def __init__(self, pool: KVPool, share: float, sink: TierSink | None) -> None:
        """`share` of rows and of snapshot places may be pinned at once. Without a sink nothing is ever offered."""
        self._pool = pool
        self._sink = sink
        self._most_rows = max(1, int(pool.row_region.capacity * share))
        self._most_snapshots = max(LEAST_SNAPSHOTS, int(pool.snapshot_region.capacity * share))
        self._pinned: dict[str, tuple[int, int]] = {}
        """Pin → rows and snapshots."""
        self._waiting: dict[Sequence, None] = {}
        self._count = 0
        self._offered = [0, 0]
        self._dropped = [0, 0]

    @property
    def counts(self) -> WriteCounts:
        return WriteCounts(
            offered_blocks=self._offered[0],
            offered_snapshots=self._offered[1],
            dropped_blocks=self._dropped[0],
            dropped_snapshots=self._dropped[1],
            pinned=len(self._pinned),
        )

    def keeps(self, sequence: Sequence) -> bool:
        """Whether anything of this sequence is ever written."""
        request = sequence.live.request
        return self._sink is not None and request.cache is not None and request.traffic in RETENTION

    def add_snapshot(self, sequence: Sequence, block_key: bytes, tokens: int) -> None:
        """A snapshot was taken at `tokens`; it follows its blocks."""
        if self.keeps(sequence) and tokens > sequence.snapshots_due_to:
            sequence.due_snapshots.append((block_key, tokens))
            sequence.snapshots_due_to = tokens

    def offer(self, sequence: Sequence) -> None:
        """Hand on what of a sequence is named, not yet offered, and finds room."""
        if not self.keeps(sequence):
            sequence.offered = max(sequence.offered, sequence.committed)
            return
        blocks = self._take_blocks(sequence)
        snapshots = self._take_snapshots(sequence)
        if blocks or snapshots:
            request = sequence.live.request
            assert request.cache is not None
            self._emit(request.cache, RETENTION[request.traffic], blocks, snapshots)
        if sequence.offered < sequence.committed or sequence.due_snapshots:
            self._waiting[sequence] = None
        else:
            self._waiting.pop(sequence, None)

    def end(self, sequence: Sequence) -> None:
        """The sequence is about to give its memory back: a last offer; the rest is dropped."""
        if not self.keeps(sequence):
            return
        for block_key, tokens in sequence.decode_snapshots:
            self.add_snapshot(sequence, block_key, tokens)
        sequence.decode_snapshots.clear()
        self.offer(sequence)
        self._dropped[0] += max(0, sequence.committed - sequence.offered)
        self._dropped[1] += len(sequence.due_snapshots)
        sequence.due_snapshots.clear()
        self._waiting.pop(sequence, None)

    def offer_prefix(self, command: OfferPrefix) -> int:
        """See OfferPrefix."""
        if self._sink is None:
            return 0
        blocks = _present(command.blocks, self._pool.row_region, self._room_rows)
        snapshots = _present(command.snapshots, self._pool.snapshot_region, self._room_snapshots)
        if blocks or snapshots:
            self._emit(command.scope, command.retention, blocks, snapshots)
        return len(blocks) + len(snapshots)

    def unpin(self, pins: tuple[str, ...]) -> None:
        """Copies are made; others get their turn. Raises EngineError NOT_FOUND."""
        for pin in pins:
            if pin not in self._pinned:
                raise EngineError(ErrorCode.NOT_FOUND, f"{pin} is not pinned")
            rows, snapshots = self._pinned.pop(pin)
            try:
                if rows:
                    self._pool.row_region.unpin(pin)
                if snapshots:
                    self._pool.snapshot_region.unpin(pin)
            except NotPinned as error:
                raise EngineError(ErrorCode.INTERNAL, str(error)) from error
        for sequence in tuple(self._waiting):
            self.offer(sequence)

    def problems(self) -> tuple[str, ...]:
        """Pins that the pool and this object do not agree on, and sequences that wait though they hold nothing."""
        found = [
            f"{pin} should pin {counts}"
            for pin, counts in self._pinned.items()
            if (len(self._pool.row_region.pinned_by(pin)), len(self._pool.snapshot_region.pinned_by(pin))) != counts
        ]
        return (
            *found,
            *(f"{each.owner} waits for the tier and has ended" for each in self._waiting if each.state is State.ENDED),
        )

    # --- inside ------------------------------------------------------------------------------------------------

    @property
    def _room_rows(self) -> int:
        return self._most_rows - sum(rows for rows, _ in self._pinned.values())

    @property
    def _room_snapshots(self) -> int:
        return self._most_snapshots - sum(snapshots for _, snapshots in self._pinned.values())

    def _take_blocks(self, sequence: Sequence) -> tuple[WriteRow, ...]:
        """Advance `sequence.offered` over blocks that find room, or are gone.

        Rows are found by key, not by the block table: a sequence that waits here may be spilled meanwhile, and its
        blocks evicted or forgotten.
        """
        room, keys, taken = self._room_rows, sequence.block_keys, list[WriteRow]()
        while sequence.offered < sequence.committed and len(taken) < room:
            index = sequence.offered
            place = self._pool.row_region.find(keys[index])
            if place is None:
                self._dropped[0] += 1
            else:
                parent = keys[index - 1] if index else sequence.live.request.key_root
                taken.append(WriteRow(keys[index], parent, (index + 1) * self._pool.layout.block_tokens, place))
            sequence.offered += 1
        return tuple(taken)

    def _take_snapshots(self, sequence: Sequence) -> tuple[WriteRow, ...]:
        """Due snapshots whose blocks are all offered. One that was evicted meanwhile is dropped."""
        room = self._room_snapshots
        offered = sequence.offered * self._pool.layout.block_tokens
        taken: list[WriteRow] = []
        while len(taken) < room and sequence.due_snapshots and sequence.due_snapshots[0][1] <= offered:
            block_key, tokens = sequence.due_snapshots.popleft()
            key = snapshot_key(block_key, self._pool.layout.ring_tokens)
            place = self._pool.snapshot_region.find(key)
            if place is None:
                self._dropped[1] += 1
            else:
                taken.append(WriteRow(key, block_key, tokens, place))
        return tuple(taken)

    def _emit(
        self,
        scope: CacheScope,
        retention: RetentionClass,
        blocks: tuple[WriteRow, ...],
        snapshots: tuple[WriteRow, ...],
    ) -> None:
        assert self._sink is not None
        self._count += 1
        pin = f"tier:{self._count}"
        if blocks:
            self._pool.row_region.pin((block.place for block in blocks), pin)
        if snapshots:
            self._pool.snapshot_region.pin((snapshot.place for snapshot in snapshots), pin)
        self._pinned[pin] = (len(blocks), len(snapshots))
        self._offered[0] += len(blocks)
        self._offered[1] += len(snapshots)
        self._sink(TierWrite(pin, scope, retention, blocks, snapshots, stream_mark(self._pool.device)))


def _present(named: Iterable[tuple[Key, Key, int]], region: Region, room: int) -> tuple[WriteRow, ...]:
    """Those that the region has, as far as there is room."""
    places = ((key, parent, tokens, region.find(key)) for key, parent, tokens in named)
    found = (WriteRow(key, parent, tokens, place) for key, parent, tokens, place in places if place is not None)
    return tuple(islice(found, max(0, room)))
