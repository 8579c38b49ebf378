"""The pool of one rank: rows, slots and snapshots as opaque bytes on one device, and who holds them.

Same code for CPU and CUDA. Models make typed views of ``rows`` and ``slots`` from the layout's sections; everything
else (prefix reuse, transfer, store) treats a row as bytes. A row's bytes are a function of its prefix and the model
alone, which is why allocation zeroes (spec/protocol.md, Exactness). Used by one thread: the rank's engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.kernels.upload import upload
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.memory import zeroed
from headrace.kvcache.region import OutOfUnits, Owner, PoolError, Region, RegionIntegrity

__all__ = ["KVPool", "OutOfRows", "OutOfSlots", "OutOfSnapshots", "OutOfUnits", "PoolError", "PoolIntegrity"]


class OutOfRows(OutOfUnits):
    """No row to give: preempt a sequence or wait (nothing was taken)."""


class OutOfSlots(OutOfUnits):
    """No slot to give: the batch is full (nothing was taken)."""


class OutOfSnapshots(OutOfUnits):
    """No snapshot place to give; a snapshot is optional, so go on without."""


@dataclass(frozen=True)
class PoolIntegrity:
    """What ``KVPool.integrity`` found, per region."""

    rows: RegionIntegrity
    slots: RegionIntegrity
    snapshots: RegionIntegrity

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(
            f"{part.name}: {text}" for part in (self.rows, self.slots, self.snapshots) for text in part.problems
        )

    @property
    def sound(self) -> bool:
        return not self.problems

    @property
    def idle(self) -> bool:
        """L11: true when sound and nothing is referenced or pinned."""
        return self.rows.idle and self.slots.idle and self.snapshots.idle


class KVPool:
    """Rows, slots, snapshots of one layout on one device.

    ``rows`` uint8 [num_rows, layout.block_bytes], ``slots`` uint8 [num_slots, layout.slot_bytes], ``snapshots`` uint8
    [num_snapshots, layout.snapshot_bytes], all contiguous and never reallocated (they are registered for transfer).
    Row 0 and slot 0 are reserved: padded block tables and batches point at them, their bytes are garbage. Snapshots
    have no reserved place. For layouts without slots (V3) every sequence uses slot 0 and allocate_slot returns 0.

    Bookkeeping beyond what this class adds is on ``row_region``, ``slot_region``, ``snapshot_region`` (hold, release,
    pin, unpin, find, set_key …).
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_rows: int,
        num_slots: int = 0,
        num_snapshots: int = 0,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> None:
        """num_rows and num_slots count the reserved row 0 and slot 0. pin_memory: page-locked host memory.

        Raises:
            PoolError: a count leaves nothing usable, or pin_memory is asked for device memory.
        """
        device = torch.device(device)
        if num_rows < 2:
            raise PoolError(f"num_rows {num_rows} must be at least 2 (row 0 is reserved)")
        if layout.slot_bytes > 0 and num_slots < 2:
            raise PoolError(f"num_slots {num_slots} must be at least 2 for {layout.family} (slot 0 is reserved)")
        if pin_memory and device.type != "cpu":
            raise PoolError(f"pin_memory is for host memory, the device is {device}")
        self.layout = layout
        self.device = device
        if layout.slot_bytes == 0:
            num_slots = 0
        if layout.snapshot_bytes == 0:
            num_snapshots = 0

        def region_bytes(count: int, size: int) -> torch.Tensor:
            return zeroed(count, size, device, pin_memory=pin_memory)

        self.rows = region_bytes(num_rows, layout.block_bytes)
        self.slots = region_bytes(num_slots, layout.slot_bytes)
        self.snapshots = region_bytes(num_snapshots, layout.snapshot_bytes)
        self.row_region = Region("rows", num_rows, reserve_first=True)
        self.slot_region = Region("slots", num_slots, reserve_first=True)
        self.snapshot_region = Region("snapshots", num_snapshots, reserve_first=False)

    # --- rows --------------------------------------------------------------------------------------------------

    def allocate_rows(self, count: int, owner: Owner) -> tuple[int, ...]:
        """``count`` zeroed rows held by ``owner``, all or none; cached rows are evicted as needed.

        Raises:
            OutOfRows: fewer are free or evictable; ``can_ever_fit`` tells a request that must be refused.
        """
        try:
            taken = self.row_region.allocate(count, owner)
        except OutOfUnits as error:
            raise OutOfRows(error.region, error.wanted, error.available, error.capacity) from None
        self._zero(self.rows, taken)
        return taken

    def fill_row(self, payload: bytes | memoryview, owner: Owner) -> int:
        """A row held by ``owner`` that holds ``payload`` (block_bytes, loaded from a tier); the caller names it.

        Raises:
            OutOfRows: none is free or evictable.
        """
        try:
            (row,) = self.row_region.allocate(1, owner)
        except OutOfUnits as error:
            raise OutOfRows(error.region, error.wanted, error.available, error.capacity) from None
        _fill(self.rows[row], payload)
        return row

    def hold_rows(self, rows: Sequence[int], owner: Owner) -> None:
        """Add a reference of ``owner`` to each row (n > 1 sharing, prefix hits). See Region.hold for the errors."""
        self.row_region.hold(rows, owner)

    def release_rows(self, rows: Sequence[int], owner: Owner) -> None:
        """Drop ``owner``'s references, rows in prefix order; keyed ones stay cached. NotHeld on a double free."""
        self.row_region.release(rows, owner)

    def copy_row(self, source: int, target: int) -> None:
        """Copy a row's bytes (copy-on-write of a partial block; choices of one request). The target must be held."""
        if self.row_region.references(target) != 1:
            raise PoolError(f"copy_row: row {target} must be held by exactly one owner to be written")
        if self.row_region.references(source) == 0 and self.row_region.key_of(source) is None:
            raise PoolError(f"copy_row: row {source} is neither held nor cached")
        self.rows[target].copy_(self.rows[source])

    def is_shared(self, row: int) -> bool:
        """True when writing the row would change bytes that another owner, a reader or a key relies on."""
        return (
            self.row_region.references(row) > 1
            or self.row_region.key_of(row) is not None
            or self.row_region.is_pinned(row)
        )

    # --- slots -------------------------------------------------------------------------------------------------

    def allocate_slot(self, owner: Owner) -> int:
        """A zeroed slot held by ``owner``; 0 for layouts without slots. Raises OutOfSlots."""
        if self.layout.slot_bytes == 0:
            return 0
        try:
            (slot,) = self.slot_region.allocate(1, owner)
        except OutOfUnits as error:
            raise OutOfSlots(error.region, error.wanted, error.available, error.capacity) from None
        self.slots[slot].zero_()
        return slot

    def release_slot(self, slot: int, owner: Owner) -> None:
        """Give a slot back; exactly once. Slot 0 of layouts without slots is nobody's: a no-op."""
        if self.layout.slot_bytes == 0 and slot == 0:
            return
        self.slot_region.release((slot,), owner)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy a slot's bytes (choices of one request start from one slot). No-op for layouts without slots."""
        if self.layout.slot_bytes:
            self.slots[target].copy_(self.slots[source])

    # --- snapshots ---------------------------------------------------------------------------------------------

    def take_snapshot(self, slot: int, owner: Owner) -> int:
        """Copy the stored rings of ``slot`` (its first snapshot_bytes) to a snapshot place held by ``owner``.

        Raises:
            OutOfSnapshots: no place is free or evictable; the snapshot is optional.
        """
        try:
            (place,) = self.snapshot_region.allocate(1, owner)
        except OutOfUnits as error:
            raise OutOfSnapshots(error.region, error.wanted, error.available, error.capacity) from None
        self.snapshots[place].copy_(self.slots[slot, : self.layout.snapshot_bytes])
        return place

    def fill_snapshot(self, payload: bytes | memoryview, owner: Owner) -> int:
        """A snapshot place held by ``owner`` that holds ``payload`` (snapshot_bytes); the caller names it.

        Raises:
            OutOfSnapshots: no place is free or evictable.
        """
        try:
            (place,) = self.snapshot_region.allocate(1, owner)
        except OutOfUnits as error:
            raise OutOfSnapshots(error.region, error.wanted, error.available, error.capacity) from None
        _fill(self.snapshots[place], payload)
        return place

    def restore_snapshot(self, snapshot: int, slot: int) -> None:
        """Copy a snapshot into the stored rings of ``slot``; the rest of the slot stays as it is (zero when fresh)."""
        self.slots[slot, : self.layout.snapshot_bytes].copy_(self.snapshots[snapshot])

    def release_snapshot(self, snapshot: int, owner: Owner) -> None:
        self.snapshot_region.release((snapshot,), owner)

    # --- whole pool --------------------------------------------------------------------------------------------

    def release_owner(self, owner: Owner) -> None:
        """Drop whatever ``owner`` still references. For the end of a request on an error path (L10); rows whose
        prefix order matters are released by release_rows first."""
        for region in (self.row_region, self.slot_region, self.snapshot_region):
            held = sorted(region.held_by(owner))
            if held:
                region.release(held, owner)

    def integrity(self) -> PoolIntegrity:
        """L11: every unit in exactly one state, maps consistent. Cheap enough to run whenever the worker is idle."""
        return PoolIntegrity(
            rows=self.row_region.integrity(),
            slots=self.slot_region.integrity(),
            snapshots=self.snapshot_region.integrity(),
        )

    def _zero(self, tensor: torch.Tensor, indexes: Sequence[int]) -> None:
        if not indexes:
            return
        if self.device.type == "cpu":
            for index in indexes:
                tensor[index].zero_()
        else:
            tensor.index_fill_(0, upload(indexes, torch.int64, self.device), 0)


def _fill(target: torch.Tensor, payload: bytes | memoryview) -> None:
    """Copy bytes over the whole of ``target`` uint8 [bytes]; done with the payload when it returns."""
    source = np.frombuffer(payload, dtype=np.uint8)
    if target.device.type == "cpu":
        np.copyto(target.numpy(), source)
    else:
        # Pageable memory: the copy has left it when copy_ returns. It is queued behind the kernels of former steps.
        target.copy_(torch.from_numpy(source.copy()))
