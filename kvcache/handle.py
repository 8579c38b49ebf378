"""The exact name of a transfer's target: what both ends compare before a byte counts (L1). No torch.

The frozen twin of the wire's TransferHandle (proto/headrace/v1/common.proto); services convert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class ChecksumKind(StrEnum):
    """How rows and slots of one transfer are checked; the sender computes, the receiver verifies after landing."""

    XXH3_64 = "xxh3_64"
    """For host memory."""
    LANES_64 = "lanes_64"
    """Order-free weighted sum mod 2⁶⁴ for device kernels; torch reference in kernels/reference/rows.py."""


class PayloadKind(StrEnum):
    """What the rows of a transfer are."""

    KV = "kv"
    EMBEDDING = "embedding"


class HandleMismatch(StrEnum):
    """Why a handle is not the one expected; any of them discards the data (L1)."""

    INCARNATION = "incarnation"
    """The receiver restarted since: its memory is another's."""
    RANK = "rank"
    REQUEST = "request"
    ATTEMPT = "attempt"
    """An older attempt: the highest wins (L16)."""
    GENERATION = "generation"
    """The rows were granted again since."""
    LAYOUT = "layout"
    MODEL = "model"
    PAYLOAD = "payload"
    PARTS = "parts"
    """Other landing rows or slots, another order, or truncated."""
    SIZES = "sizes"
    TRANSFER = "transfer"
    """A late completion of an earlier transfer over the same rows."""
    CHECKSUM_KIND = "checksum_kind"
    METADATA_VERSION = "metadata_version"
    """The landing region was rebuilt since."""


class HandleRejected(ValueError):
    """A handle differs from the live reservation. Discard the data; recompute or transfer again under a new handle."""

    def __init__(self, reasons: tuple[HandleMismatch, ...]) -> None:
        super().__init__(f"transfer handle rejected, these differ: {', '.join(reasons)}")
        self.reasons = reasons


@dataclass(frozen=True)
class LandingPart:
    """Landing rows, and slot, of one choice or of what all choices share."""

    choice: int | None
    """None: shared by all choices."""
    blocks: tuple[int, ...]
    """Index of each block in the sequence (embeddings: of each span token), ascending; blocks[i] lands in rows[i]."""
    rows: tuple[int, ...]
    slot: int | None
    """None where the layout has no slot or none is expected."""

    def __post_init__(self) -> None:
        if len(self.blocks) != len(self.rows):
            raise ValueError(
                f"{len(self.blocks)} blocks but {len(self.rows)} landing rows: one row per block is needed"
            )


@dataclass(frozen=True)
class Handle:
    """Where one transfer lands and on whose behalf."""

    transfer_id: str
    """Never reused in an incarnation; a late completion is recognised by it."""
    incarnation: str
    """Of the receiver, whose landing region is named."""
    request_id: str
    attempt: int
    """≥ 1."""
    generation: int
    """Counts grants of landing rows, so a row that is granted again has a higher one."""
    layout_fingerprint: bytes
    """32 bytes, KVLayout.fingerprint."""
    model_fingerprint: bytes
    """32 bytes."""
    parts: tuple[LandingPart, ...]
    row_bytes: int
    slot_bytes: int
    """0 for layouts without slots."""
    checksum_kind: ChecksumKind
    rank: int = 0
    payload: PayloadKind = PayloadKind.KV
    metadata_version: int = 1
    """Version of the landing region; a rebuilt one counts up (and is registered anew)."""

    @property
    def landing_rows(self) -> tuple[int, ...]:
        """Every landing row, part after part."""
        return tuple(row for part in self.parts for row in part.rows)

    @property
    def landing_slots(self) -> tuple[int, ...]:
        """Every landing slot, part after part."""
        return tuple(part.slot for part in self.parts if part.slot is not None)

    def check(self, expected: Handle) -> tuple[HandleMismatch, ...]:
        """Every field in which this handle differs from ``expected``; empty when it is exact."""
        pairs: tuple[tuple[HandleMismatch, object, object], ...] = (
            (HandleMismatch.TRANSFER, self.transfer_id, expected.transfer_id),
            (HandleMismatch.INCARNATION, self.incarnation, expected.incarnation),
            (HandleMismatch.RANK, self.rank, expected.rank),
            (HandleMismatch.REQUEST, self.request_id, expected.request_id),
            (HandleMismatch.ATTEMPT, self.attempt, expected.attempt),
            (HandleMismatch.GENERATION, self.generation, expected.generation),
            (HandleMismatch.LAYOUT, self.layout_fingerprint, expected.layout_fingerprint),
            (HandleMismatch.MODEL, self.model_fingerprint, expected.model_fingerprint),
            (HandleMismatch.PAYLOAD, self.payload, expected.payload),
            (HandleMismatch.PARTS, self.parts, expected.parts),
            (HandleMismatch.SIZES, (self.row_bytes, self.slot_bytes), (expected.row_bytes, expected.slot_bytes)),
            (HandleMismatch.CHECKSUM_KIND, self.checksum_kind, expected.checksum_kind),
            (HandleMismatch.METADATA_VERSION, self.metadata_version, expected.metadata_version),
        )
        return tuple(reason for reason, mine, theirs in pairs if mine != theirs)

    def require(self, expected: Handle) -> None:
        """Raises HandleRejected with every reason unless this handle equals ``expected``."""
        reasons = self.check(expected)
        if reasons:
            raise HandleRejected(reasons)

    def without_parts(self) -> Handle:
        """The same identity with no rows and slots, for log lines."""
        return replace(self, parts=())
