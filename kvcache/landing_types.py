"""What goes in and out of a landing region: errors, states, requests, reports. No tensors, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.kvcache.handle import ChecksumKind, LandingPart, PayloadKind


class LandingError(RuntimeError):
    """The landing region cannot do that; it is unchanged."""


class OutOfLanding(LandingError):
    """Not enough free landing rows or slots. Push back; when much is quarantined, rebuild."""


class StaleAttempt(LandingError):
    """A higher attempt of this request has landing rows: the caller is superseded (L16)."""


class ReservationConflict(LandingError):
    """The same (request, attempt) asks again with other parts."""


class RegionClosed(LandingError):
    """The region was rebuilt; reserve in its successor."""


class UnknownTransfer(LandingError):
    """No live reservation has this transfer id: it ended, was taken, or never was. Discard the data."""


class NotQuiet(LandingError):
    """The sender has not said that the wire is quiet, so nothing may be read yet (L7)."""


class ChecksumMismatch(LandingError):
    """Some rows or slots did not match (L1). Nothing may be used; reserve again for ``bad`` and have it resent."""

    def __init__(self, transfer_id: str, bad: tuple[LandingPart, ...]) -> None:
        rows = sum(len(part.rows) for part in bad)
        slots = sum(part.slot is not None for part in bad)
        super().__init__(
            f"transfer {transfer_id}: {rows} rows and {slots} slots do not match their checksums: resend them"
        )
        self.bad = bad
        """The parts of the handle that did not match, reduced to the bad rows (and slot)."""


class TransferState(StrEnum):
    """State of a reservation; see the module's picture."""

    OPEN = "open"
    QUIET = "quiet"
    QUARANTINED = "quarantined"


class NoticeResult(StrEnum):
    """What a terminal notice did."""

    READY = "ready"
    """The transfer is complete: take it."""
    FAILED = "failed"
    """The wire is quiet but data is missing; the rows are free, the request needs a new transfer."""
    RELEASED = "released"
    """Quarantined rows are free again; nobody waits for them."""
    REPEATED = "repeated"
    """The notice was known already."""
    LATE = "late"
    """No such live transfer: recognised by its id, nothing changed (its rows may be another's by now)."""


@dataclass(frozen=True)
class PartRequest:
    """Landing rows wanted for one choice, or shared by all (choice None)."""

    choice: int | None
    blocks: tuple[int, ...]
    with_slot: bool


@dataclass(frozen=True)
class PartChecksums:
    """Checksums of one LandingPart in its order; slot is present exactly when the part has one."""

    rows: tuple[int, ...]
    slot: int | None = None


@dataclass(frozen=True)
class PartTarget:
    """Where the rows (and slot) of one LandingPart are copied to: indexes into the tensors given to take()."""

    rows: tuple[int, ...]
    slot: int | None = None


@dataclass(frozen=True)
class LandingIdentity:
    """What every handle of this region carries besides its own numbers (L1)."""

    incarnation: str
    layout_fingerprint: bytes
    model_fingerprint: bytes
    checksum_kind: ChecksumKind
    payload: PayloadKind = PayloadKind.KV
    rank: int = 0


@dataclass(frozen=True)
class UnitCounts:
    """Landing rows, or slots, by state."""

    capacity: int
    free: int
    open: int
    quiet: int
    quarantined: int


@dataclass(frozen=True)
class LandingIntegrity:
    """What ``LandingRegion.integrity`` found."""

    rows: UnitCounts
    slots: UnitCounts
    transfers: int
    problems: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not self.problems

    @property
    def idle(self) -> bool:
        """L11: no reservation, so every row and slot is free."""
        return self.sound and self.transfers == 0
