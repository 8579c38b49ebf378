"""What the sending side of byte streams needs of whoever carries them; services implement it over their own RPC."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from headrace.kvcache.handle import Handle
from headrace.kvcache.transfer.base import PeerDescription
from headrace.kvcache.transfer.regions import RegionRole


@dataclass(frozen=True, slots=True)
class RowPiece:
    """A run of bytes of one landing row or slot."""

    role: RegionRole
    item: int
    offset: int
    data: bytes


class OutboundStream(Protocol):
    """An open stream. Every method raises PeerLost or WireFailed, and waits while the receiver takes nothing."""

    async def write(self, pieces: Sequence[RowPiece]) -> None:
        """Hand pieces over; they may be changed here when this returns."""

    async def end(self, *, complete: bool, nbytes: int) -> None:
        """The terminal notice, as the last message."""

    async def close(self) -> None:
        """Returns when every byte lies in the landing rows."""


class RowWire(Protocol):
    """Used on one event loop."""

    @property
    def message_bytes(self) -> int:
        """Most bytes of rows in one message: what a cancelled push may still have on the wire."""

    async def greet(self, peer: PeerDescription, timeout_s: float) -> None:
        """The listener is there and of this cluster. Raises PeerLost."""

    def open(
        self, peer: PeerDescription, handle: Handle, timeout_s: float
    ) -> AbstractAsyncContextManager[OutboundStream]:
        """A stream that ends with the block: one that was not closed breaks off, and nothing more of it is sent."""
