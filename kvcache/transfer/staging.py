"""Gathering scattered rows into registered staging memory, so that few large pieces go on the wire (design "Block").

The same code on any device; on a GPU one kernel per batch gathers and sums. Scattering on receipt is the landing
region's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from headrace.kernels.reference.rows import gather_rows
from headrace.kernels.rows import row_ops
from headrace.kernels.upload import upload
from headrace.kvcache.checksum import checksums, unsigned
from headrace.kvcache.handle import ChecksumKind
from headrace.kvcache.transfer.agent import Registration


@dataclass(eq=False)
class StagingSlot:
    """One slice of a device's staging memory; in use from the gather until its request is complete."""

    bytes: torch.Tensor
    """uint8 [slot_bytes]."""
    home: list[StagingSlot]
    sums: tuple[int, ...] = ()
    """Checksums of what was gathered."""

    def rows(self, count: int, item_bytes: int) -> torch.Tensor:
        """View [count, item_bytes] of the slot's start."""
        return self.bytes[: count * item_bytes].view(count, item_bytes)

    def free(self) -> None:
        self.home.append(self)


class Staging:
    """Staging memory per device, allocated and registered when a device first needs it. Transfer thread only."""

    def __init__(self, slots: int, total_bytes: int, register: Callable[[torch.Tensor], Registration]) -> None:
        self._slots = slots
        self._slot_bytes = total_bytes // slots
        self._register = register
        self._free: dict[torch.device, list[StagingSlot]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> AbstractContextManager[object]:
        """Gather and checksum run on a stream of their own: on the default one they would wait for the next chunk."""
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._streams[device])

    def items_per_slot(self, item_bytes: int) -> int:
        return max(1, self._slot_bytes // item_bytes)

    def gather(self, base: torch.Tensor, items: Sequence[int], kind: ChecksumKind) -> StagingSlot | None:
        """Copy ``items`` of base [n, item_bytes] to a free slot, in order, and sum them; None while all are in use.

        Returns when the bytes are there. The caller has made sure that the source's are final.
        """
        slots = self._slots_of(base.device, base.shape[1])
        if not slots:
            return None
        slot = slots.pop()
        index = upload(items, torch.int64, base.device)
        count, rows = len(items), slot.rows(len(items), base.shape[1])
        if kind is ChecksumKind.LANES_64:
            # One pass over the rows; reading the sums back is the wait for the bytes.
            places = torch.arange(count, device=base.device)
            slot.sums = unsigned(row_ops(base.device.type).copy_checksummed(base, index, rows, places))
        else:
            gather_rows(base, index, rows)
            slot.sums = checksums(rows, range(count), kind)
        return slot

    def _slots_of(self, device: torch.device, item_bytes: int) -> list[StagingSlot]:
        known = self._free.get(device)
        if known is None or (known and known[0].bytes.numel() < item_bytes):
            size = max(self._slot_bytes, item_bytes)
            memory = torch.empty((self._slots, size), dtype=torch.uint8, device=device)
            self._register(memory)
            known = self._free[device] = []
            known.extend(StagingSlot(memory[index], known) for index in range(self._slots))
        return known
