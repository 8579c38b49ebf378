"""Where peers write: landing rows and slots, their reservations, and quarantine (L1, L6, L7).

A remote write cannot be recalled: one that was posted lands even after the target's deadline, abort or deregistration
(measured, spec/protocol.md). So peers write here and never into a pool, and a landing row goes back to the free ones
only when its sender has said that the wire is quiet, or when the sender's process is known dead. A deadline or an abort
ends the *request's* wait; rows that a peer may still write go to quarantine: neither free nor readable.

The states of a transfer are landing_books.py's; here are the bytes. ``take`` copies into memory that is the receiver's
alone and then verifies the *copy*: a frozen sender that wakes between check and copy cannot slip bytes past the check.
Used by one thread, the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.kvcache.checksum import warm_up
from headrace.kvcache.handle import ChecksumKind, Handle
from headrace.kvcache.landing_books import LandingBooks
from headrace.kvcache.landing_copy import copy_verified
from headrace.kvcache.landing_types import (
    ChecksumMismatch,
    LandingError,
    LandingIdentity,
    LandingIntegrity,
    NoticeResult,
    NotQuiet,
    OutOfLanding,
    PartChecksums,
    PartRequest,
    PartTarget,
    RegionClosed,
    ReservationConflict,
    StaleAttempt,
    TransferState,
    UnitCounts,
    UnknownTransfer,
)
from headrace.kvcache.memory import zeroed

__all__ = [
    "ChecksumMismatch",
    "LandingError",
    "LandingIdentity",
    "LandingIntegrity",
    "LandingRegion",
    "NotQuiet",
    "NoticeResult",
    "OutOfLanding",
    "PartChecksums",
    "PartRequest",
    "PartTarget",
    "RegionClosed",
    "ReservationConflict",
    "StaleAttempt",
    "TransferState",
    "UnitCounts",
    "UnknownTransfer",
]


class LandingRegion(LandingBooks):
    """Landing rows and slots of one rank: one byte region, ``rows`` uint8 [num_rows, row_bytes] before ``slots`` uint8
    [num_slots, slot_bytes], both registered for remote writes and never reallocated.

    For embeddings a row is one image token's embedding and there are no slots.
    """

    def __init__(
        self,
        identity: LandingIdentity,
        *,
        row_bytes: int,
        slot_bytes: int,
        num_rows: int,
        num_slots: int,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
        quarantine_limit: float = 0.25,
        version: int = 1,
        generation: int = 0,
    ) -> None:
        """quarantine_limit: share of the region's bytes in quarantine above which the worker is unready.

        version: 1 for the first region; generation: grants made by its predecessors (see rebuild).
        """
        if num_rows < 1 or row_bytes < 1 or num_slots < 0 or slot_bytes < 0:
            raise LandingError(
                f"{num_rows} rows of {row_bytes} B and {num_slots} slots of {slot_bytes} B: nothing can land"
            )
        if not 0 < quarantine_limit <= 1:
            raise LandingError(f"quarantine_limit {quarantine_limit} must be in (0, 1]")
        slots = num_slots if slot_bytes else 0
        super().__init__(
            identity,
            row_bytes=row_bytes,
            slot_bytes=slot_bytes,
            num_rows=num_rows,
            num_slots=slots,
            version=version,
            generation=generation,
        )
        self.device = torch.device(device)
        self.quarantine_limit = quarantine_limit
        self._pin_memory = pin_memory
        self.bytes = zeroed(1, num_rows * row_bytes + slots * slot_bytes, self.device, pin_memory=pin_memory)[0]
        self.rows = self.bytes[: num_rows * row_bytes].view(num_rows, row_bytes)
        self.slots = self.bytes[num_rows * row_bytes :].view(slots, slot_bytes)
        if identity.checksum_kind is ChecksumKind.LANES_64:
            warm_up(self.rows)

    def take(
        self,
        handle: Handle,
        sums: Sequence[PartChecksums],
        targets: Sequence[PartTarget],
        rows: torch.Tensor,
        slots: torch.Tensor | None = None,
    ) -> None:
        """Copy a complete transfer into the receiver's own memory, verify the copy, and free the landing rows.

        Args:
            handle: as the sender presents it; every field is compared (L1).
            sums, targets: one per part of the handle. Targets are rows of ``rows`` uint8 [N, row_bytes] (pool.rows) and
                slots of ``slots``, held by the request and seen by nobody else until this returns.

        Raises:
            UnknownTransfer, HandleRejected: discard the data; the live transfer, if any, is untouched.
            NotQuiet: no complete notice yet. LandingError: counts differ from the handle (truncated).
            ChecksumMismatch: targets hold bad bytes and must not be used; the landing rows are free.
        """
        transfer = self._live(handle.transfer_id)
        handle.require(transfer.handle)
        if transfer.state is not TransferState.QUIET:
            raise NotQuiet(f"transfer {handle.transfer_id} is {transfer.state}: its sender may still write")
        bad = copy_verified(handle, sums, targets, (self.rows, rows), None if slots is None else (self.slots, slots))
        self._free(transfer)
        if bad:
            raise ChecksumMismatch(handle.transfer_id, bad)

    @property
    def too_much_quarantine(self) -> bool:
        """The worker is unready and rebuilds its landing region (spec/protocol.md)."""
        return self.quarantined_bytes > self.quarantine_limit * self.bytes.numel()

    def rebuild(self) -> LandingRegion:
        """A fresh region of the same size; this one grants nothing more.

        Its live transfers end as usual. Keep its memory, registered or not, until ``drained``: a posted write lands
        even after deregistration. Transfer ids go on counting, so none is used twice.
        """
        self._closed = True
        fresh = LandingRegion(
            self.identity,
            row_bytes=self.row_bytes,
            slot_bytes=self.slot_bytes,
            num_rows=self.rows.shape[0],
            num_slots=self.slots.shape[0],
            device=self.device,
            pin_memory=self._pin_memory,
            quarantine_limit=self.quarantine_limit,
            version=self.version + 1,
            generation=self._generation,
        )
        for sender in self._dead:
            fresh._dead.add(sender)
        return fresh
