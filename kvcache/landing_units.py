"""Which landing rows (or slots) are free, how they are granted, and the count of their states (L11). No tensors."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.kvcache.handle import LandingPart
from headrace.kvcache.landing_types import PartRequest, TransferState, UnitCounts


class LandingUnits:
    """Free landing rows, or slots, 0 … capacity − 1; the rest belong to transfers."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free: set[int] = set(range(capacity))

    def grant(self, count: int) -> tuple[int, ...]:
        """The lowest run of ``count`` neighbours, which is one piece on the wire, else the lowest ones.

        The caller has checked that ``count`` ≤ len(free).
        """
        if count == 0:
            return ()
        ordered = sorted(self.free)
        for start in range(len(ordered) - count + 1):
            if ordered[start + count - 1] - ordered[start] == count - 1:
                chosen = ordered[start : start + count]
                break
        else:
            chosen = ordered[:count]
        self.free.difference_update(chosen)
        return tuple(chosen)


def deal(wanted: Sequence[PartRequest], rows: Sequence[int], slots: Sequence[int]) -> tuple[LandingPart, ...]:
    """Hand out granted rows and slots to the parts, in order."""
    parts: list[LandingPart] = []
    row, slot = 0, 0
    for part in wanted:
        count = len(part.blocks)
        parts.append(
            LandingPart(
                part.choice, part.blocks, tuple(rows[row : row + count]), slots[slot] if part.with_slot else None
            )
        )
        row += count
        slot += part.with_slot
    return tuple(parts)


def count_units(
    units: LandingUnits, used: Sequence[tuple[TransferState, tuple[int, ...]]], name: str, problems: list[str]
) -> UnitCounts:
    seen: dict[int, int] = dict.fromkeys(units.free, 1)
    by_state = dict.fromkeys(TransferState, 0)
    for state, indexes in used:
        by_state[state] += len(indexes)
        for index in indexes:
            seen[index] = seen.get(index, 0) + 1
    for index in range(units.capacity):
        if seen.pop(index, 0) != 1:
            problems.append(f"{name} {index} is not in exactly one state")
    problems.extend(f"{name} {index} does not exist" for index in seen)
    return UnitCounts(
        capacity=units.capacity,
        free=len(units.free),
        open=by_state[TransferState.OPEN],
        quiet=by_state[TransferState.QUIET],
        quarantined=by_state[TransferState.QUARANTINED],
    )
