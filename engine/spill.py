"""A bounded host region for memory of preempted sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spilled:
    """What a preempted sequence left on the host. Blocks that others share stay in the pool, still referenced."""

    block_indexes: tuple[int, ...]
    rows: torch.Tensor
    """[len(block_indexes), block_bytes] uint8 on the host."""
    slot: torch.Tensor
    """[slot_bytes] uint8 on the host; empty for layouts without slots."""

    @property
    def bytes(self) -> int:
        return self.rows.numel() + self.slot.numel()


class SpillRegion:
    """Counts what live sequences have spilled; the count is the size of a live set (L11)."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._held: dict[str, Spilled] = {}

    @property
    def used_bytes(self) -> int:
        return sum(spilled.bytes for spilled in self._held.values())

    @property
    def owners(self) -> frozenset[str]:
        return frozenset(self._held)

    def fits(self, size: int) -> bool:
        return self.used_bytes + size <= self.capacity_bytes

    def put(self, owner: str, spilled: Spilled) -> None:
        """Keep `spilled` for `owner`. The caller asked `fits` before it copied."""
        if owner in self._held or not self.fits(spilled.bytes):
            raise ValueError(f"{owner} has spilled already, or {spilled.bytes} bytes do not fit the spill region")
        self._held[owner] = spilled

    def take(self, owner: str) -> Spilled:
        """Remove and return what `owner` spilled. Raises KeyError when it has nothing here."""
        return self._held.pop(owner)
