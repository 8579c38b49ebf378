"""The books of a region compared with each other (L11): pure, and apart from who keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from headrace.kvcache.region_types import RegionIntegrity


@dataclass(frozen=True)
class RegionBooks:
    """What a region has written down, as it stands; read at once, never kept."""

    name: str
    units: range
    """All that can be given out."""
    free: Sequence[int]
    owners_of: Mapping[int, Set[str]]
    held_by: Mapping[str, Set[int]]
    pins_of: Mapping[int, Set[str]]
    pinned_by: Mapping[str, Set[int]]
    draining: Set[int]
    cached: Set[int]
    key_of: Mapping[int, bytes]
    index_of: Mapping[bytes, int]


def check_region(books: RegionBooks) -> RegionIntegrity:
    """Every unit is in exactly one state, and all maps agree; O(units)."""
    problems: list[str] = []
    free = set(books.free)
    if len(free) != len(books.free):
        problems.append("a unit stands twice in the free list")
    held, named = set(books.owners_of), set(books.key_of)
    states = {"free": free, "held": held, "draining": books.draining, "cached": books.cached}
    for index in books.units:
        found = [name for name, members in states.items() if index in members]
        if len(found) != 1:
            problems.append(f"unit {index} is in states {found or 'none'}")
    for name, members in states.items():
        if any(index not in books.units for index in members):
            problems.append(f"{name} names a reserved or impossible unit")
    if _inverted(books.owners_of) != books.held_by:
        problems.append("owners of units and units of owners disagree")
    if _inverted(books.pins_of) != books.pinned_by:
        problems.append("pins of units and units of pins disagree")
    if any(not owners for owners in books.owners_of.values()):
        problems.append("a held unit has no owner")
    if {index: key for key, index in books.index_of.items()} != books.key_of:
        problems.append("keys of units and units of keys disagree")
    if not books.cached <= named:
        problems.append("a cached unit has no key")
    if books.draining & named or not books.draining <= set(books.pins_of):
        problems.append("a draining unit has a key or no pin")
    if free & (named | set(books.pins_of)):
        problems.append("a free unit has a key or a pin")
    return RegionIntegrity(
        name=books.name,
        capacity=len(books.units),
        free=len(free),
        held=len(held),
        draining=len(books.draining),
        cached=len(books.cached),
        pinned=len(books.pins_of),
        references=sum(len(owners) for owners in books.owners_of.values()),
        owners=len(books.held_by),
        problems=tuple(problems),
    )


def _inverted(map_of_sets: Mapping[int, Set[str]]) -> dict[str, set[int]]:
    inverse: dict[str, set[int]] = {}
    for index, names in map_of_sets.items():
        for name in names:
            inverse.setdefault(name, set()).add(index)
    return inverse
