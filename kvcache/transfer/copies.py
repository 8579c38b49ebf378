"""Copies of byte ranges between two processes' registered memory: a peer's host tier is read, not pushed from.

Unlike a push (base.py) a copy grants nothing at the other end and says no last word there: the peer keeps the source in
place for as long as its lease promises, and the reader verifies what came (L1, L3). Where reading is slow (TCP: 0.08 of
memcpy against 0.33 for writing, design.md) the lessor writes into the reader's buffer instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.kvcache.transfer.wire_job import WireJob


class Direction(StrEnum):
    READ = "read"
    """A peer's READABLE region → a FETCHED region of this process."""
    WRITE = "write"
    """A READABLE region of this process → a peer's FETCHED region."""


@dataclass(frozen=True, slots=True)
class Span:
    """One contiguous run of bytes."""

    local: int
    """Byte offset in the region of this process."""
    remote: int
    """Byte offset in the peer's region."""
    length: int


@dataclass(frozen=True)
class CopyResult:
    """Every byte has arrived."""

    nbytes: int
    transport: str
    seconds: float
    """From the first post to the last completion, by the engine's clock."""


class Copy(WireJob[CopyResult]):
    """One copy: until ``terminal`` the memory that it goes into may still change. Past its deadline the wait ends with
    CopyDeadline."""

    def __init__(self, direction: Direction, peer: str, spans: tuple[Span, ...]) -> None:
        super().__init__()
        self.direction = direction
        self.peer = peer
        """Incarnation."""
        self.spans = spans
        self.nbytes = sum(span.length for span in spans)
