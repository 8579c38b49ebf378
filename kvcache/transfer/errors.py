"""What can go wrong in a transfer, typed. Each message says what the caller does next."""

from __future__ import annotations

from enum import StrEnum


class TransferError(RuntimeError):
    """Base of everything the transfer engine raises on purpose."""


class Refusal(StrEnum):
    """Why a peer is not connected, or a push not posted."""

    INCARNATION = "incarnation"
    """Another life of the peer than the one connected (L14): take its new description and a new handle."""
    LAYOUT = "layout"
    MODEL = "model"
    TRANSPORT = "transport"
    """The wire that UCX chose is not among the allowed ones, or there is none."""
    SENDER = "sender"
    """A stream of another process than the one that the rows were granted to."""
    METADATA_VERSION = "metadata_version"
    """The receiver rebuilt its landing region: connect its newer description first."""
    METADATA = "metadata"
    """The description cannot be read."""
    NOT_CONNECTED = "not_connected"
    TARGET = "target"
    """Rows or slots that the handle does not grant, or a region that is no landing region."""
    SOURCE = "source"
    """Source rows out of range, an unknown region, or counts that differ."""
    SIZES = "sizes"
    CHECKSUM = "checksum"
    """A kind of checksum that this memory cannot have."""
    CONFLICT = "conflict"
    """Another handle of the same transfer id, or a landing row that was pushed before: rows are written once."""
    ENDED = "ended"
    """The transfer has had its terminal notice; more rows need a new handle."""


class PeerRefused(TransferError):
    """The handshake failed; nothing is connected."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(f"peer refused ({reason}): {message}")
        self.reason = reason


class PushRefused(TransferError):
    """The push was refused before anything was posted (L1, L10); source rows are not pinned by it."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(f"push refused ({reason}): {message}")
        self.reason = reason


class CopyRefused(TransferError):
    """The copy was refused before anything was posted (L1, L10)."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(f"copy refused ({reason}): {message}")
        self.reason = reason


class PushCut(TransferError):
    """The owner gave the transfer up before everything was posted. Nothing more of it goes on the wire."""

    def __init__(self, transfer_id: str) -> None:
        super().__init__(f"transfer {transfer_id} was given up; say its last word and release its rows")


class StreamRefused(TransferError):
    """Bytes that came by stream are not taken (L1): nothing of this message was written. Reserve again."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(f"stream refused ({reason}): {message}")
        self.reason = reason


class TransferBusy(TransferError):
    """The bounded queue of pushes and copies is full (L12). Wait for one to finish, then try again."""


class PeerLost(TransferError):
    """The connection to the receiver broke: dead, or unreachable. Send elsewhere under a new attempt."""

    def __init__(self, incarnation: str, message: str) -> None:
        super().__init__(f"peer {incarnation} is lost ({message}): reroute to another replica under a new attempt")
        self.incarnation = incarnation


class PushDeadline(TransferError):
    """The wait ended, not the write (L6): source rows stay pinned until the push is terminal."""

    def __init__(self, transfer_id: str, timeout_s: float) -> None:
        super().__init__(
            f"transfer {transfer_id}: not on the wire after {timeout_s:g} s; end the request, keep the rows pinned "
            f"until the push is terminal"
        )
        self.transfer_id = transfer_id


class CopyDeadline(TransferError):
    """The wait ended, not the copy (L6): the memory it goes into may change until it is terminal."""

    def __init__(self, incarnation: str, timeout_s: float) -> None:
        super().__init__(
            f"copy with {incarnation}: not complete after {timeout_s:g} s; go on without, and keep its memory until "
            f"the copy is terminal"
        )
        self.incarnation = incarnation


class WireFailed(TransferError):
    """The wire reported an error that is not a lost peer. Push again under a new handle."""


class EngineClosed(TransferError):
    """The transfer engine was closed; the process is going down."""
