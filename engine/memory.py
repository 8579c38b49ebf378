"""Rows, slots and snapshots of sequences: what is taken at admission, grown, shared, committed, spilled, given back.

The only file of the engine that changes the pool's bookkeeping. Everything a sequence holds, it holds under its owner
name, so that its end, on any path, releases exactly that (L7, L10).
"""

from __future__ import annotations

import torch

from headrace.engine.live import LiveRequest
from headrace.engine.sequence import Sequence
from headrace.engine.settings import EngineSettings
from headrace.engine.spill import Spilled, SpillRegion
from headrace.engine.tier_loads import Loads
from headrace.engine.tier_messages import TierSink
from headrace.engine.tier_writes import TierWrites
from headrace.kvcache.keys import KeyChain, snapshot_key
from headrace.kvcache.pool import KVPool, OutOfRows, OutOfSlots
from headrace.kvcache.prefix import PrefixCache


class SequenceMemory:
    """Used by the engine thread only."""

    def __init__(self, pool: KVPool, settings: EngineSettings, tier: TierSink | None = None) -> None:
        """`tier` takes what is to be kept beyond this pool."""
        self.pool = pool
        self.prefix = PrefixCache(pool)
        self.spilled = SpillRegion(settings.spill_bytes)
        self.loads = Loads(pool, self.prefix, settings.load_fraction)
        # What no request here would reuse, none elsewhere will: workers of a model have one replay mode.
        reuses = settings.prefix_reuse and not (pool.layout.has_snapshots and settings.replay == "off")
        self.writes = TierWrites(pool, settings.write_fraction, tier if reuses else None)
        self._block = pool.layout.block_tokens

    # --- admission and growth ----------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, *, spare_rows: int = 0) -> bool:
        """Take what a queued sequence needs to run up to its known tokens and one more; nothing when it does not fit.

        `spare_rows` must stay available afterwards, so that running sequences can grow without preempting the newcomer.
        """
        if sequence.spilled is not None:
            return self._resume(sequence, spare_rows)
        live = sequence.live
        limit = live.replay.largest_prefix(sequence.known, self._block)
        keys = self.extend_keys(sequence, limit // self._block)
        match = self.prefix.acquire(keys, limit, sequence.owner)
        if not self._book(sequence, match.rows, spare_rows):
            if match.snapshot is not None:
                self.pool.release_snapshot(match.snapshot, sequence.owner)
            return False
        if match.snapshot is not None:
            self.pool.restore_snapshot(match.snapshot, sequence.slot)
            self.pool.release_snapshot(match.snapshot, sequence.owner)
        sequence.computed = match.tokens
        sequence.committed = len(match.rows)
        sequence.offered = max(sequence.offered, len(match.rows))
        live.count_reused(match.tokens, self._block)
        sequence.high = max(sequence.high, match.tokens)
        return True

    def reserve(self, sequence: Sequence, *, spare_rows: int) -> bool:
        """Decode's booking: leading blocks that are here already, and zeroed rows and slots for the rest (L23)."""
        keys = self.extend_keys(sequence, sequence.known // self._block)
        held = self.prefix.acquire_blocks(keys, sequence.owner)
        if not self._book(sequence, held, spare_rows):
            return False
        sequence.live.held_blocks = len(held)
        sequence.committed = len(held)
        return True

    def grow(self, sequence: Sequence, positions: int) -> bool:
        """Rows for positions [0, positions); False, with nothing taken, when the pool has none."""
        missing = self.pool.layout.blocks_for(positions) - len(sequence.blocks)
        if missing > 0:
            if missing > self.pool.row_region.available and not self.loads.give_way(missing):
                return False
            sequence.blocks += self.pool.allocate_rows(missing, sequence.owner)
        return True

    def fork(self, live: LiveRequest) -> None:
        """The prompt is computed: choices 1 … n − 1 share its full blocks and get their own copy of tail and slot."""
        leader = live.sequences[0]
        leader.output = list(live.request.delivered_to(0))
        full = live.prompt_length // self._block
        shared, tail = leader.blocks[:full], leader.blocks[full]
        for choice in range(1, live.width):
            sequence = live.new_sequence(choice)
            sequence.computed = sequence.high = leader.computed
            sequence.block_keys = list(leader.block_keys[:full])
            sequence.committed = min(leader.committed, full)
            sequence.offered = full
            row = live.spare_rows.pop()
            slot = live.spare_slots.pop()
            self.pool.hold_rows((*shared, row), sequence.owner)
            self.pool.release_rows((row,), leader.owner)
            self.pool.copy_row(tail, row)
            sequence.blocks = [*shared, row]
            if self.pool.layout.slot_bytes:
                self.pool.slot_region.hold((slot,), sequence.owner)
                self.pool.release_slot(slot, leader.owner)
                self.pool.copy_slot(leader.slot, slot)
            sequence.slot = slot
            live.sequences.append(sequence)

    # --- prefix reuse ------------------------------------------------------------------------------------------

    def extend_keys(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """Keys of the first `blocks` blocks, whose tokens must all be known."""
        done = len(sequence.block_keys)
        if done < blocks:
            start, end = done * self._block, blocks * self._block
            request = sequence.live.request
            spans = [image.span for image in request.images]
            chain = KeyChain(
                sequence.block_keys[-1] if done else request.key_root,
                self._block,
                first_block=done,
                open_spans=[span for span in spans if span.start < start < span.end],
            )
            inside = [span for span in spans if start <= span.start < end]
            sequence.block_keys += chain.extend(sequence.tokens(start, end), inside)
        return sequence.block_keys[:blocks]

    def commit(self, sequence: Sequence) -> None:
        """Name the blocks that are now computed in full; take a snapshot where one is due."""
        finished = sequence.computed // self._block
        if finished > sequence.committed:
            keys = self.extend_keys(sequence, finished)[sequence.committed :]
            rows = sequence.blocks[sequence.committed : finished]
            before = sequence.committed
            parent = sequence.block_keys[before - 1] if before else sequence.live.request.key_root
            sequence.blocks[before:finished] = self.prefix.commit(
                keys, rows, sequence.owner, parent=parent, first_block=before
            )
            sequence.committed = finished
        self._snapshot(sequence, finished)
        self.writes.offer(sequence)

    def _snapshot(self, sequence: Sequence, finished: int) -> None:
        if sequence.computed % self._block or not self.pool.layout.has_snapshots or not sequence.computed:
            return
        if sequence.computed in sequence.live.replay.snapshot_positions:
            key, position = sequence.block_keys[finished - 1], sequence.computed
            if self.prefix.commit_snapshot(key, sequence.slot, end_tokens=position):
                self.writes.add_snapshot(sequence, key, position)
        elif sequence.computed > sequence.live.prompt_length and sequence.live.replay.decode_snapshots:
            self._decode_snapshot(sequence, sequence.block_keys[finished - 1])

    def _decode_snapshot(self, sequence: Sequence, block_key: bytes) -> None:
        if self.prefix.find_snapshot(block_key) is not None or not self.prefix.commit_snapshot(
            block_key, sequence.slot, end_tokens=sequence.computed
        ):
            return
        sequence.decode_snapshots.append((block_key, sequence.computed))
        if len(sequence.decode_snapshots) > sequence.live.replay.decode_snapshots:
            oldest, _ = sequence.decode_snapshots.popleft()
            self.pool.snapshot_region.forget(snapshot_key(oldest, self.pool.layout.ring_tokens))

    # --- giving back -------------------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """The end of a sequence: everything it holds, in the pool and on the host."""
        if sequence.spilled is not None:
            self.spilled.take(sequence.owner)
            sequence.spilled = None
        self._give_back(sequence)

    def forget(self, sequence: Sequence) -> bool:
        """Release everything so that the sequence is recomputed from its tokens with its N₀.

        False when that is impossible here, since its images' embeddings are elsewhere; it holds nothing then either.
        """
        self.release(sequence)
        sequence.computed = sequence.committed = 0
        return all(image.embeddings is not None for image in sequence.live.request.images)

    def spill(self, sequence: Sequence) -> bool:
        """Copy rows that nobody shares, and the slot, to the host, and release them. False when the region is full."""
        region = self.pool.row_region
        private = tuple(index for index, row in enumerate(sequence.blocks) if region.references(row) == 1)
        layout = self.pool.layout
        if not self.spilled.fits(len(private) * layout.block_bytes + layout.slot_bytes):
            return False
        rows = [sequence.blocks[index] for index in private]
        slot = self.pool.slots[sequence.slot] if layout.slot_bytes else torch.empty(0, dtype=torch.uint8)
        spilled = Spilled(private, self.pool.rows[rows].cpu(), slot.to("cpu", copy=True))
        self.spilled.put(sequence.owner, spilled)
        sequence.spilled = spilled
        kept = set(private)
        self._give_back(sequence, keep=[row for index, row in enumerate(sequence.blocks) if index not in kept])
        return True

    def _resume(self, sequence: Sequence, spare_rows: int) -> bool:
        spilled = sequence.spilled
        assert spilled is not None
        held = list(sequence.blocks)
        wanted = self.pool.layout.blocks_for(sequence.known) - len(held)
        if not self._book(sequence, tuple(held), spare_rows, total=len(held) + max(wanted, len(spilled.block_indexes))):
            return False
        fresh = sequence.blocks[len(held) :]
        back, rest = fresh[: len(spilled.block_indexes)], fresh[len(spilled.block_indexes) :]
        places = dict(zip(spilled.block_indexes, back, strict=True))
        remaining = iter(held)
        count = len(held) + len(back)
        sequence.blocks = [places[index] if index in places else next(remaining) for index in range(count)] + rest
        for index, row in enumerate(back):
            self.pool.rows[row].copy_(spilled.rows[index])
        if self.pool.layout.slot_bytes:
            self.pool.slots[sequence.slot].copy_(spilled.slot)
        sequence.committed = min([sequence.committed, *spilled.block_indexes])
        self.spilled.take(sequence.owner)
        sequence.spilled = None
        return True

    def _book(self, sequence: Sequence, held: tuple[int, ...], spare_rows: int, total: int | None = None) -> bool:
        """Rows behind `held` (released again on failure, unless a spilled sequence keeps them), slots and spares."""
        live = sequence.live
        spares = live.width - 1 if sequence.is_leader else 0
        blocks = sequence.known // self._block + 1 if total is None else total
        count = blocks - len(held) + spares
        try:
            available = self.pool.row_region.available
            if available < count + spare_rows and not self.loads.give_way(count + spare_rows):
                raise OutOfRows("rows", count + spare_rows, available, self.pool.row_region.capacity)
            rows = list(self.pool.allocate_rows(count, sequence.owner))
            try:
                slots = self._allocate_slots(1 + spares, sequence.owner)
            except OutOfSlots:
                self.pool.release_rows(rows, sequence.owner)
                raise
        except (OutOfRows, OutOfSlots):
            if sequence.spilled is None:
                self.pool.release_rows(held, sequence.owner)
            return False
        live.spare_rows, rows = (rows[len(rows) - spares :], rows[: len(rows) - spares]) if spares else ([], rows)
        sequence.slot, live.spare_slots = slots[0], slots[1:]
        sequence.blocks = [*held, *rows]
        return True

    def _allocate_slots(self, count: int, owner: str) -> list[int]:
        slots: list[int] = []
        try:
            for _ in range(count):
                slots.append(self.pool.allocate_slot(owner))
        except OutOfSlots:
            for slot in slots:
                self.pool.release_slot(slot, owner)
            raise
        return slots

    def _give_back(self, sequence: Sequence, keep: list[int] | None = None) -> None:
        kept = set(keep or ())
        self.pool.release_rows([row for row in sequence.blocks if row not in kept], sequence.owner)
        sequence.blocks = keep or []
        live = sequence.live
        if sequence.choice == 0 and live.spare_rows:
            self.pool.release_rows(live.spare_rows, sequence.owner)
            live.spare_rows = []
        if self.pool.layout.slot_bytes:
            spares = live.spare_slots if sequence.choice == 0 else []
            for slot in (*((sequence.slot,) if sequence.slot else ()), *spares):
                self.pool.release_slot(slot, sequence.owner)
        if sequence.choice == 0:
            live.spare_slots = []
        sequence.slot = 0
