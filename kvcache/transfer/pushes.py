"""Pushes of rows under a handle, and the notice that ends a transfer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headrace.kvcache.handle import Handle
from headrace.kvcache.transfer.regions import RegionRole
from headrace.kvcache.transfer.wire_job import WireJob


@dataclass(frozen=True)
class RowMove:
    """``source_items[i]`` of a local region goes to ``target_items[i]`` of the receiver's region of ``target`` role."""

    source: str
    """Name of a region registered here."""
    source_items: tuple[int, ...]
    target_items: tuple[int, ...]
    """Landing rows (or slots) that the handle grants."""
    target: RegionRole = RegionRole.LANDING_ROWS


class Ready(Protocol):
    """Tells that queued device work is done; torch.cuda.Event is one."""

    def query(self) -> bool:
        """True once everything before it has run. Never blocks."""
        ...


@dataclass(frozen=True)
class PushResult:
    """A push whose every byte has landed."""

    transfer_id: str
    checksums: tuple[tuple[int, ...], ...]
    """Per move, per item: checksum of the bytes sent, of the handle's kind, unsigned 64 bits."""
    nbytes: int
    descriptors: int
    """Pieces on the wire after merging neighbours; far below the rows' number where rows stand together."""
    transport: str
    """``cma``, ``tcp``, ``cuda_ipc``, ``rdma`` … as found by asking UCX."""
    seconds: float
    """From the first post to the last completion, by the engine's clock; for reports."""


class Push(WireJob[PushResult]):
    """One push; ``terminal`` frees the source rows. Past its deadline the wait ends with PushDeadline."""

    def __init__(self, handle: Handle, moves: tuple[RowMove, ...], nbytes: int) -> None:
        super().__init__()
        self.handle = handle
        self.moves = moves
        self.nbytes = nbytes

    @property
    def transfer_id(self) -> str:
        return self.handle.transfer_id


class Outcome(StrEnum):
    """How a transfer ended; either way its landing rows will not be written again."""

    OK = "ok"
    """Every push under the handle landed."""
    FAILED = "failed"
    """Some push failed or was cut by its deadline, or the sender gave up."""


@dataclass(frozen=True)
class TerminalNotice:
    """What the sender's last word says, delivered to the receiver behind the last write."""

    transfer_id: str
    request_id: str
    attempt: int
    generation: int
    outcome: Outcome
    nbytes: int
    """Landed under this handle, all pushes together."""
    sender: str = ""
    """Agent name of the sender, as the wire tells it."""
