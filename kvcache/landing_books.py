"""Who holds which landing rows: reservations, how they end, quarantine (L1, L6, L7). No tensors.

    reserve ──► OPEN ──notice ok──► QUIET ──take──► rows free
                 │ │                  └──abort, expiry──► rows free
                 │ └──notice failed, sender dead──► rows free
                 └──abort, expiry, newer attempt──► QUARANTINED ──any notice, sender dead──► rows free

Time is injected (monotonic seconds). Used by one thread, the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kvcache.handle import Handle
from headrace.kvcache.landing_types import (
    LandingError,
    LandingIdentity,
    LandingIntegrity,
    NoticeResult,
    OutOfLanding,
    PartRequest,
    RegionClosed,
    ReservationConflict,
    StaleAttempt,
    TransferState,
    UnknownTransfer,
)
from headrace.kvcache.landing_units import LandingUnits, count_units, deal
from headrace.kvcache.last_keys import LastKeys

MOST_DEAD = 1024
"""Dead senders that are remembered."""


@dataclass
class _Transfer:
    handle: Handle
    wanted: tuple[PartRequest, ...]
    deadline: float
    sender: str | None
    state: TransferState = TransferState.OPEN


class LandingBooks:
    """The transfers of one landing region (landing.py), which owns the bytes."""

    def __init__(
        self,
        identity: LandingIdentity,
        *,
        row_bytes: int,
        slot_bytes: int,
        num_rows: int,
        num_slots: int,
        version: int,
        generation: int,
    ) -> None:
        """version: 1 for the first region; generation: grants made by its predecessors."""
        self.identity = identity
        self.row_bytes = row_bytes
        self.slot_bytes = slot_bytes
        self.version = version
        self._row_units = LandingUnits(num_rows)
        self._slot_units = LandingUnits(num_slots)
        self._transfers: dict[str, _Transfer] = {}
        self._generation = generation
        self._closed = False
        self._dead: LastKeys[str] = LastKeys(MOST_DEAD)
        """Senders known to be dead, the last ones: a grant may be meant for one that died on the way to it."""
        self.late_notices = 0
        """Notices that named no live transfer, since start (a metric)."""

    # --- reservations ------------------------------------------------------------------------------------------

    def reserve(
        self,
        request_id: str,
        attempt: int,
        parts: Sequence[PartRequest],
        *,
        deadline: float,
        sender: str | None = None,
    ) -> Handle:
        """Grant landing rows (and slots) to one transfer under a new transfer id. Nothing is taken on an error.

        Idempotent: a repeat by (request, attempt) with the same parts, while that transfer is waited for, gives the
        same handle and the later deadline. A higher attempt ends the lower ones (L16): their rows go to quarantine.

        Args:
            deadline: monotonic seconds at which the wait ends (expire); sender: incarnation that will write, where it
                is known already (else bind_sender).

        Raises:
            OutOfLanding, StaleAttempt, ReservationConflict, RegionClosed.
        """
        wanted = tuple(parts)
        for transfer in self._of_request(request_id):
            if transfer.handle.attempt > attempt:
                raise StaleAttempt(f"request {request_id}: attempt {attempt} is older than {transfer.handle.attempt}")
            if transfer.handle.attempt == attempt and _waiting(transfer):
                if transfer.wanted != wanted or sender not in (None, transfer.sender):
                    raise ReservationConflict(f"request {request_id} attempt {attempt} asks again for other rows")
                transfer.deadline = max(transfer.deadline, deadline)
                return transfer.handle
        if self._closed:
            raise RegionClosed(f"landing region {self.version} was rebuilt: reserve in its successor")
        num_rows = sum(len(part.blocks) for part in wanted)
        num_slots = sum(part.with_slot for part in wanted)
        if num_rows > len(self._row_units.free) or num_slots > len(self._slot_units.free):
            raise OutOfLanding(
                f"{num_rows} rows and {num_slots} slots wanted, {len(self._row_units.free)} and "
                f"{len(self._slot_units.free)} free: push back and try again"
            )
        for transfer in self._of_request(request_id):
            if transfer.handle.attempt < attempt:
                self._end_wait(transfer)
        rows = self._row_units.grant(num_rows)
        slots = self._slot_units.grant(num_slots)
        self._generation += 1
        identity = self.identity
        handle = Handle(
            transfer_id=f"{identity.incarnation}.{identity.rank}.{identity.payload}.{self._generation}",
            incarnation=identity.incarnation,
            request_id=request_id,
            attempt=attempt,
            generation=self._generation,
            layout_fingerprint=identity.layout_fingerprint,
            model_fingerprint=identity.model_fingerprint,
            parts=deal(wanted, rows, slots),
            row_bytes=self.row_bytes,
            slot_bytes=self.slot_bytes,
            checksum_kind=identity.checksum_kind,
            rank=identity.rank,
            payload=identity.payload,
            metadata_version=self.version,
        )
        self._transfers[handle.transfer_id] = _Transfer(handle, wanted, deadline, sender)
        return handle

    def bind_sender(self, transfer_id: str, sender: str) -> None:
        """Say which incarnation writes, so that its death can free the rows. Raises UnknownTransfer, LandingError when
        another one is bound."""
        transfer = self._live(transfer_id)
        if transfer.sender not in (None, sender):
            raise LandingError(f"transfer {transfer_id} is bound to sender {transfer.sender}, not {sender}")
        transfer.sender = sender

    def renew(self, transfer_id: str, deadline: float) -> None:
        """Move the deadline of a live wait (L8). Raises UnknownTransfer, also when nobody waits any more."""
        transfer = self._live(transfer_id)
        if transfer.state is TransferState.QUARANTINED:
            raise UnknownTransfer(f"transfer {transfer_id} has ended, its rows are quarantined: reserve again")
        transfer.deadline = deadline

    def state(self, transfer_id: str) -> TransferState | None:
        """State of a transfer, None when it is not live."""
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None else transfer.state

    # --- what ends a transfer ----------------------------------------------------------------------------------

    def notice(self, transfer_id: str, *, complete: bool) -> NoticeResult:
        """The sender's terminal notice: no write of this transfer is on the wire, none will follow.

        complete: every row landed. False also stands for "never sent", told by whoever holds an unused handle.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self.late_notices += 1
            return NoticeResult.LATE
        if transfer.state is TransferState.QUIET:
            return NoticeResult.REPEATED
        if transfer.state is TransferState.OPEN and complete:
            transfer.state = TransferState.QUIET
            return NoticeResult.READY
        failed = transfer.state is TransferState.OPEN
        self._free(transfer)
        return NoticeResult.FAILED if failed else NoticeResult.RELEASED

    def quarantined(self) -> tuple[tuple[Handle, str | None], ...]:
        """Grants that nobody waits for and whose sender has not said its last word; the sender, where it is known."""
        return tuple(
            (each.handle, each.sender) for each in self._transfers.values() if each.state is TransferState.QUARANTINED
        )

    def writable(self, transfer_id: str) -> bool:
        """Whether its sender may still write its rows."""
        transfer = self._transfers.get(transfer_id)
        return transfer is not None and transfer.state is not TransferState.QUIET

    def abort(self, request_id: str, attempt: int) -> int:
        """End the wait of every attempt up to this one; open rows go to quarantine (L7). Idempotent; returns how many
        waits ended."""
        ended = [each for each in self._of_request(request_id) if each.handle.attempt <= attempt and _waiting(each)]
        for transfer in ended:
            self._end_wait(transfer)
        return len(ended)

    def expire(self, now: float) -> tuple[Handle, ...]:
        """End every wait whose deadline has come (L6); open rows go to quarantine. Returns the ended handles."""
        ended = [transfer for transfer in self._transfers.values() if _waiting(transfer) and transfer.deadline <= now]
        for transfer in ended:
            self._end_wait(transfer)
        return tuple(transfer.handle for transfer in ended)

    def sender_died(self, sender: str) -> tuple[Handle, ...]:
        """The incarnation's process is known dead (not merely silent: a stopped process is alive and may still write).

        Its open and quarantined rows become free; complete transfers stay, their data is here. Returns the handles that
        somebody was waiting for.
        """
        dead = [
            each for each in self._transfers.values() if each.sender == sender and each.state is not TransferState.QUIET
        ]
        waiting = tuple(transfer.handle for transfer in dead if _waiting(transfer))
        for transfer in dead:
            self._free(transfer)
        self._dead.add(sender)
        return waiting

    # --- health ------------------------------------------------------------------------------------------------

    @property
    def quarantined_bytes(self) -> int:
        return sum(
            len(transfer.handle.landing_rows) * self.row_bytes + len(transfer.handle.landing_slots) * self.slot_bytes
            for transfer in self._transfers.values()
            if transfer.state is TransferState.QUARANTINED
        )

    @property
    def drained(self) -> bool:
        """True when no live transfer is left, so that a rebuilt region's memory may go."""
        return not self._transfers

    def integrity(self) -> LandingIntegrity:
        """L11: every row and slot is free or belongs to exactly one transfer; O(rows)."""
        problems: list[str] = []
        transfers = list(self._transfers.values())
        rows = count_units(
            self._row_units, [(each.state, each.handle.landing_rows) for each in transfers], "row", problems
        )
        slots = count_units(
            self._slot_units, [(each.state, each.handle.landing_slots) for each in transfers], "slot", problems
        )
        for transfer_id, transfer in self._transfers.items():
            if transfer.handle.transfer_id != transfer_id:
                problems.append(f"transfer {transfer.handle.transfer_id} is filed under {transfer_id}")
        return LandingIntegrity(rows=rows, slots=slots, transfers=len(transfers), problems=tuple(problems))

    # --- inside ------------------------------------------------------------------------------------------------

    def _of_request(self, request_id: str) -> list[_Transfer]:
        return [transfer for transfer in self._transfers.values() if transfer.handle.request_id == request_id]

    def _live(self, transfer_id: str) -> _Transfer:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise UnknownTransfer(f"transfer {transfer_id} is not live here: discard its data and transfer again")
        return transfer

    def _end_wait(self, transfer: _Transfer) -> None:
        """Nobody waits any more: quiet rows are free, as are those of a dead sender; others may still be written and go
        to quarantine."""
        if transfer.state is TransferState.QUIET or transfer.sender in self._dead:
            self._free(transfer)
        else:
            transfer.state = TransferState.QUARANTINED

    def _free(self, transfer: _Transfer) -> None:
        del self._transfers[transfer.handle.transfer_id]
        self._row_units.free.update(transfer.handle.landing_rows)
        self._slot_units.free.update(transfer.handle.landing_slots)


def _waiting(transfer: _Transfer) -> bool:
    return transfer.state is not TransferState.QUARANTINED
