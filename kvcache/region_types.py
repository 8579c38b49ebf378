"""Names, errors and report of the unit bookkeeping in region.py."""

from __future__ import annotations

from dataclasses import dataclass

Owner = str
"""Who references a unit: a sequence (request/choice). Each owner references a unit at most once."""
Pin = str
"""What keeps a unit's bytes in place without owning it: a transfer id, a tier write."""


class PoolError(RuntimeError):
    """A caller broke the pool's contract; the pool is unchanged."""


class OutOfUnits(PoolError):
    """Not enough free and evictable units; nothing was taken. Preempt or wait, then ask again."""

    def __init__(self, region: str, wanted: int, available: int, capacity: int) -> None:
        super().__init__(
            f"{wanted} {region} wanted, {available} of {capacity} are free or evictable: "
            f"{'preempt or wait' if wanted <= capacity else 'can never fit, refuse the request'}"
        )
        self.region = region
        self.wanted = wanted
        self.available = available
        self.capacity = capacity

    @property
    def can_ever_fit(self) -> bool:
        return self.wanted <= self.capacity


class NotHeld(PoolError):
    """Release, or key, by an owner that does not reference the unit: a double free or another's unit (L7)."""


class AlreadyHeld(PoolError):
    """The owner references this unit already."""


class NotPinned(PoolError):
    """Unpin of a unit that this pin does not hold."""


class BadUnit(PoolError):
    """Index out of range, reserved, or free: nothing may reference, pin or key it."""


class KeyConflict(PoolError):
    """The key names another unit, or the unit has another key already."""


@dataclass(frozen=True)
class RegionIntegrity:
    """State counts of one region and what is wrong with it; free + held + draining + cached = capacity."""

    name: str
    capacity: int
    """Units that can be given out (without the reserved one)."""
    free: int
    held: int
    draining: int
    cached: int
    pinned: int
    """Units with at least one pin, whatever their state."""
    references: int
    owners: int
    problems: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not self.problems

    @property
    def idle(self) -> bool:
        """L11: nothing references or pins anything; cached units may remain."""
        return self.sound and not (self.held or self.draining or self.pinned or self.owners)
