"""Memory that a transfer engine knows: registered here, or described by a peer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from headrace.kvcache.handle import PayloadKind


class RegionRole(StrEnum):
    """What peers may do with a region."""

    SOURCE = "source"
    """Sent from, never written by a peer: its memory keys are not published."""
    LANDING_ROWS = "landing_rows"
    LANDING_SLOTS = "landing_slots"
    READABLE = "readable"
    """The host tier: peers that hold a lease read from it (copies.py). Its keys are published; nothing here writes to a
    peer's, and what is read from it is verified at every hit (L3)."""
    FETCHED = "fetched"
    """A reader's buffer: its own reads go into it, and over TCP a lessor's writes, each into a part that nobody else
    uses until it is terminal (L7)."""


@dataclass(frozen=True, eq=False)
class MemoryRegion:
    """Registered memory: uint8 [items, item_bytes], contiguous, never reallocated while registered."""

    name: str
    base: torch.Tensor
    role: RegionRole = RegionRole.SOURCE
    payload: PayloadKind = PayloadKind.KV
    """What lands here. Irrelevant for sources."""
    version: int = 1
    """Of a landing region: rebuilt ones count up (LandingRegion.version), a handle names it as metadata_version. Peers
    are told of the highest per (payload, role); an older one stays registered until it is drained."""

    def __post_init__(self) -> None:
        if self.base.dtype != torch.uint8 or self.base.dim() != 2 or not self.base.is_contiguous():
            raise ValueError(f"region {self.name}: base must be a contiguous uint8 tensor [items, item_bytes]")
        if self.base.numel() == 0:
            raise ValueError(f"region {self.name}: nothing to register ({tuple(self.base.shape)})")

    @property
    def items(self) -> int:
        return self.base.shape[0]

    @property
    def item_bytes(self) -> int:
        return self.base.shape[1]

    @property
    def memory(self) -> str:
        """``cpu``, ``cuda`` …: where the bytes lie."""
        return self.base.device.type


@dataclass(frozen=True)
class RegionDescription:
    """A landing region, or host tier memory, as a peer sees it; twin of proto LandingRegion. A handle's payload and a
    move's role find it.

    Its version travels in the opaque metadata."""

    payload: PayloadKind
    role: RegionRole
    base_address: int
    item_bytes: int
    items: int
    memory: str
    """``cpu``, ``cuda`` …"""
    device_id: int
    """0 for host memory."""
