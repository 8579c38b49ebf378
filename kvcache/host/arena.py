"""Where entries of two sizes lie in one stretch of memory. Arithmetic and bookkeeping only; no bytes are touched.

Memory is cut into slabs of the size of the largest entry. A slab holds either one snapshot or as many blocks as fit
(12 of 114,048 B in 1,415,040 B, 3 % lost), and is anybody's again once it is empty. Two fixed regions would need the
ratio of blocks to snapshots in advance, which the traffic decides; a free list of extents would fragment. When one kind
has a slab's worth of free units scattered over its slabs, moving the emptiest slab's entries into them frees that slab:
at most one slab per kind stays half empty for good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.kvcache.entries import EntryKind

PAGE_BYTES = 4096


class HostTierError(RuntimeError):
    """The caller broke the host tier's contract; nothing has changed."""


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """How a budget is cut."""

    block_bytes: int
    snapshot_bytes: int
    """0: the model has no snapshots."""
    slab_bytes: int
    """The largest entry, rounded up to whole pages of 4 KiB."""
    slabs: int

    @property
    def total_bytes(self) -> int:
        return self.slab_bytes * self.slabs

    def entry_bytes(self, kind: EntryKind) -> int:
        return self.block_bytes if kind is EntryKind.BLOCK else self.snapshot_bytes

    def units_per_slab(self, kind: EntryKind) -> int:
        size = self.entry_bytes(kind)
        return self.slab_bytes // size if size else 0


def arena_shape(budget_bytes: int, block_bytes: int, snapshot_bytes: int) -> ArenaShape:
    """As many slabs as fit into the budget; perhaps none. Raises HostTierError for sizes that no layout has."""
    if block_bytes < 1 or snapshot_bytes < 0 or budget_bytes < 0:
        raise HostTierError(
            f"budget {budget_bytes}, block {block_bytes} and snapshot {snapshot_bytes} bytes: too small"
        )
    slab_bytes = -(-max(block_bytes, snapshot_bytes) // PAGE_BYTES) * PAGE_BYTES
    return ArenaShape(block_bytes, snapshot_bytes, slab_bytes, budget_bytes // slab_bytes)


@dataclass(frozen=True, slots=True)
class Move:
    """An entry's bytes go from one offset to another; both are units of the same kind and do not overlap."""

    source: int
    target: int


class Arena:
    """Which unit of which slab is taken. Not thread-safe: the tier's lock guards it."""

    def __init__(self, shape: ArenaShape) -> None:
        self.shape = shape
        self._empty: list[int] = list(range(shape.slabs - 1, -1, -1))
        self._free_in: dict[EntryKind, dict[int, list[int]]] = {kind: {} for kind in EntryKind}
        """Per kind: slab → offsets of its free units, for slabs of this kind that have some and are not empty."""
        self._live_in: dict[EntryKind, dict[int, set[int]]] = {kind: {} for kind in EntryKind}
        """Per kind: slab → offsets in use, for every slab of this kind."""
        self._free_units: dict[EntryKind, int] = dict.fromkeys(EntryKind, 0)
        """Sum over _free_in: asked at every eviction, so not added up anew."""

    def take(self, kind: EntryKind) -> int | None:
        """The byte offset of a free unit, or None."""
        partial = self._free_in[kind]
        if partial:
            # The slab opened first fills up first, so that those opened last empty out.
            slab = next(iter(partial))
        elif self._empty and self.shape.units_per_slab(kind):
            slab = self._empty.pop()
            size, base = self.shape.entry_bytes(kind), slab * self.shape.slab_bytes
            partial[slab] = [base + size * unit for unit in reversed(range(self.shape.units_per_slab(kind)))]
            self._live_in[kind][slab] = set()
            self._free_units[kind] += len(partial[slab])
        else:
            return None
        offset = partial[slab].pop()
        self._free_units[kind] -= 1
        if not partial[slab]:
            del partial[slab]
        self._live_in[kind][slab].add(offset)
        return offset

    def give(self, kind: EntryKind, offset: int) -> None:
        """Take a unit back. Raises HostTierError when it is not in use as this kind."""
        slab = offset // self.shape.slab_bytes
        live = self._live_in[kind].get(slab)
        if live is None or offset not in live:
            raise HostTierError(f"no {kind.name.lower()} is in use at byte {offset} of the host tier (double free?)")
        live.discard(offset)
        if live:
            self._free_in[kind].setdefault(slab, []).append(offset)
            self._free_units[kind] += 1
        else:
            del self._live_in[kind][slab]
            self._free_units[kind] -= len(self._free_in[kind].pop(slab, ()))
            self._empty.append(slab)

    def compact(self, kind: EntryKind, may_move: Callable[[int], bool]) -> list[Move] | None:
        """Free one slab of `kind`: what moves where, or None when its free units do not make up a slab or every slab
        holds an entry that may not move (L7: pinned). The moves are made in the books; the caller copies the bytes at
        once."""
        free = self._free_in[kind]
        if not free or self._free_units[kind] < self.shape.units_per_slab(kind):
            return None
        live_in = self._live_in[kind]
        for slab in sorted(free, key=lambda each: len(live_in[each])):
            if all(may_move(offset) for offset in live_in[slab]):
                break
        else:
            return None
        moving = live_in.pop(slab)
        self._free_units[kind] -= len(free.pop(slab)) + len(moving)
        self._empty.append(slab)
        targets: list[int] = []
        for other in list(free):
            while free.get(other) and len(targets) < len(moving):
                offset = free[other].pop()
                live_in[other].add(offset)
                targets.append(offset)
                if not free[other]:
                    del free[other]
        return [Move(source, target) for source, target in zip(sorted(moving), targets, strict=True)]

    # --- sizes and integrity -------------------------------------------------------------------------------------

    def in_use(self, kind: EntryKind) -> frozenset[int]:
        """Offsets of the units in use."""
        return frozenset(offset for live in self._live_in[kind].values() for offset in live)

    def problems(self) -> tuple[str, ...]:
        """Every slab is empty or of one kind, and its units are free or in use, each once (L11)."""
        found: list[str] = []
        owners: dict[int, list[str]] = {}
        for slab in self._empty:
            owners.setdefault(slab, []).append("empty")
        for kind in EntryKind:
            for slab, live in self._live_in[kind].items():
                owners.setdefault(slab, []).append(kind.name.lower())
                free = self._free_in[kind].get(slab, [])
                if not live or len(live) + len(free) != self.shape.units_per_slab(kind) or live & set(free):
                    found.append(f"slab {slab} has {len(live)} live and {len(free)} free units of {kind.name.lower()}")
            if set(self._free_in[kind]) - set(self._live_in[kind]):
                found.append(f"slabs with free units of {kind.name.lower()} that are not of that kind")
            if sum(map(len, self._free_in[kind].values())) != self._free_units[kind]:
                found.append(f"free units of {kind.name.lower()} and their count disagree")
        found += [f"slab {slab} is {names}" for slab, names in owners.items() if len(names) != 1]
        if len(owners) != self.shape.slabs:
            found.append(f"{len(owners)} slabs are accounted for, there are {self.shape.slabs}")
        return tuple(found)
