"""Prefixes on their way from the tier into the pool, before their requests are queued.

A load holds rows and snapshots under its own owner name, so that nothing evicts them until the request itself holds
them. These holds give way: when a running sequence or an admission needs rows, the youngest load lets go first and what
it had stays cached, to be evicted like anything else and computed if it is. So a load never starves what runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.errors import EngineError, ErrorCode, invalid
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.tier_messages import Adopt, Adoption
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.keys import Key, snapshot_key
from headrace.kvcache.pool import KVPool, OutOfSnapshots
from headrace.kvcache.prefix import PrefixCache
from headrace.kvcache.tier.plan import Wanted


def load_owner(key: RequestKey) -> str:
    """Name under which the pool knows what a load holds."""
    return f"load:{key}"


@dataclass(eq=False)
class Load:
    """One request's load."""

    key: RequestKey
    root: Key
    keys: tuple[Key, ...]
    """Of the prefix's blocks."""
    blocks: dict[Key, int]
    """Their indexes."""
    deadline: float | None
    loaded: set[int] = field(default_factory=set)
    """Indexes of blocks that came from the tier."""


class Loads:
    """Used by the engine thread only."""

    def __init__(self, pool: KVPool, prefix: PrefixCache, share: float) -> None:
        """`share` of the pool's rows is the most that all loads together may hold."""
        self._pool = pool
        self._prefix = prefix
        self._most = int(pool.row_region.capacity * share)
        self._loads: dict[RequestKey, Load] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._loads

    @property
    def owners(self) -> frozenset[str]:
        """Names under which loads may hold units."""
        return frozenset(load_owner(key) for key in self._loads)

    def begin(self, request: EngineRequest, keys: list[Key]) -> Wanted:
        """Hold what is here of blocks `keys`. The caller has checked the request."""
        key = request.key
        if key in self._loads:
            raise EngineError(ErrorCode.ABORTED, f"{key} is loading already")
        for lower in [other for other in self._loads if other.request_id == key.request_id]:
            self.end(lower)
        indexes = {block: index for index, block in enumerate(keys)}
        load = Load(key, request.key_root, tuple(keys), indexes, request.deadline)
        region, owner = self._pool.row_region, load_owner(key)
        rows = [region.find(block) for block in keys]
        region.hold([row for row in rows if row is not None], owner)
        block_tokens = self._pool.layout.block_tokens
        usable = self._prefix.lookup(keys, len(keys) * block_tokens)
        places = {} if usable.snapshot is None else {usable.tokens: usable.snapshot}
        if self._pool.layout.has_snapshots and self._pool.snapshot_region.named:
            for index in range(len(keys), usable.tokens // block_tokens, -1):
                place = self._prefix.find_snapshot(keys[index - 1])
                if place is not None:
                    places[index * block_tokens] = place
                    break
        self._pool.snapshot_region.hold(tuple(places.values()), owner)
        self._loads[key] = load
        return Wanted(
            keys=tuple(keys),
            present=tuple(row is not None for row in rows),
            snapshots=tuple(sorted(places)),
            usable_tokens=usable.tokens,
            room_blocks=self._room(),
        )

    def adopt(self, command: Adopt) -> int:
        """See Adopt."""
        load = self._loads.get(command.key)
        if load is None:
            raise EngineError(ErrorCode.NOT_FOUND, f"no load of {command.key}: it is over")
        layout, taken = self._pool.layout, 0
        for entry in command.entries:
            size = layout.block_bytes if entry.kind is EntryKind.BLOCK else layout.snapshot_bytes
            if len(entry.payload) != size:
                raise invalid(f"an entry of {len(entry.payload)} bytes; this layout has {size} for a {entry.kind.name}")
        room = self._room()
        for entry in command.entries:
            if entry.kind is EntryKind.SNAPSHOT:
                adopted = self._adopt_snapshot(load, entry)
            else:
                adopted = self._adopt_block(load, entry, room)
                room -= adopted
            if not adopted:
                break
            taken += 1
        return taken

    def take_over(self, key: RequestKey) -> frozenset[int]:
        """The request is live: which block indexes its load brought (L27). The holds last until `end`."""
        load = self._loads.get(key)
        return frozenset() if load is None else frozenset(load.loaded)

    def end(self, key: RequestKey) -> bool:
        """Let go of a load; whether there was one. What it held stays cached."""
        load = self._loads.pop(key, None)
        if load is None:
            return False
        self._let_go(load)
        return True

    def end_up_to(self, key: RequestKey) -> bool:
        """End the loads of a request up to this attempt (L16)."""
        found = [other for other in self._loads if other.request_id == key.request_id and other.attempt <= key.attempt]
        for other in found:
            self.end(other)
        return bool(found)

    def clear(self) -> None:
        for key in tuple(self._loads):
            self.end(key)

    def next_expiry(self) -> float | None:
        return min((load.deadline for load in self._loads.values() if load.deadline is not None), default=None)

    def expire(self, now: float) -> None:
        """End loads whose request is late (L6)."""
        for load in tuple(self._loads.values()):
            if load.deadline is not None and load.deadline <= now:
                self.end(load.key)

    def give_way(self, rows: int) -> bool:
        """Make `rows` rows available by letting loads go, youngest first; False, with nothing changed, if that does
        not suffice. The loads go on and may adopt again what room allows."""
        region = self._pool.row_region
        missing = rows - region.available
        owners = self.owners
        holds = [(load, region.held_by(load_owner(load.key))) for load in reversed(self._loads.values())]
        if missing > sum(
            1 for row in frozenset().union(*(held for _, held in holds)) if region.only_held_by(row, owners)
        ):
            return False
        for load, held in holds:
            if region.available >= rows:
                break
            if held:
                self._let_go(load)
        return True

    # --- inside ------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        region = self._pool.row_region
        held = sum(len(region.held_by(owner)) for owner in self.owners)
        return max(0, min(self._most - held, region.available))

    def _adopt_block(self, load: Load, entry: Adoption, room: int) -> bool:
        region, owner = self._pool.row_region, load_owner(load.key)
        index = load.blocks.get(entry.key)
        if index is None:
            raise invalid("an adopted block is not of the request's prefix")
        present = region.find(entry.key)
        if present is not None:
            if present not in region.held_by(owner):
                region.hold((present,), owner)
            return True
        if room < 1:
            return False
        parent = load.keys[index - 1] if index else load.root
        end = (index + 1) * self._pool.layout.block_tokens
        self._prefix.adopt_block(entry.key, entry.payload, owner, parent=parent, end=end)
        load.loaded.add(index)
        return True

    def _adopt_snapshot(self, load: Load, entry: Adoption) -> bool:
        region, owner = self._pool.snapshot_region, load_owner(load.key)
        present = region.find(entry.key)
        if present is not None:
            if present not in region.held_by(owner):
                region.hold((present,), owner)
            return True
        layout = self._pool.layout
        found = (index for index, block in enumerate(load.keys) if snapshot_key(block, layout.ring_tokens) == entry.key)
        index = next(found, None)
        if index is None:
            raise invalid("an adopted snapshot is not of the request's prefix")
        try:
            self._prefix.adopt_snapshot(entry.key, entry.payload, owner, end=(index + 1) * layout.block_tokens)
        except OutOfSnapshots:
            return False
        return True

    def _let_go(self, load: Load) -> None:
        owner = load_owner(load.key)
        rows = self._pool.row_region.held_by(owner)
        ordered = sorted(rows, key=lambda row: load.blocks.get(self._pool.row_region.key_of(row) or b"", 0))
        self._pool.release_rows(ordered, owner)
        self._pool.snapshot_region.release(sorted(self._pool.snapshot_region.held_by(owner)), owner)
