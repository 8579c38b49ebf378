"""The unit bookkeeping against a plain twin, in any order of allocate, hold, release, pin, key and forget (L7, L11)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kvcache.region import AlreadyHeld, BadUnit, KeyConflict, NotHeld, NotPinned, OutOfUnits, PoolError, Region

SIZE = 7
OWNERS = ["a", "b", "c"]
PINS = ["p", "q"]
UNITS = st.integers(0, SIZE)  # 0 is reserved, SIZE out of range: both must be refused
KEYS = st.sampled_from([bytes([value]) * 32 for value in range(6)])


class Twin(RuleBasedStateMachine):
    """Per unit: owners, pins, key; plus one list in order of caching. Everything is derived anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.region = Region("rows", SIZE, reserve_first=True)
        self.evicted: list[bytes] = []
        self.region.on_removed = self.evicted.extend
        self.last_words: list[tuple[bytes, int]] = []
        self.region.on_evict = lambda key, unit: self.last_words.append((key, unit))
        self.owners: dict[int, set[str]] = {unit: set() for unit in range(1, SIZE)}
        self.pins: dict[int, set[str]] = {unit: set() for unit in range(1, SIZE)}
        self.keys: dict[int, bytes] = {}
        self.lru: list[int] = []

    def state(self, unit: int) -> str:
        if self.owners[unit]:
            return "held"
        if unit in self.keys:
            return "cached"
        return "draining" if self.pins[unit] else "free"

    def units(self, state: str) -> set[int]:
        return {unit for unit in self.owners if self.state(unit) == state}

    @rule(count=st.integers(0, SIZE + 1), owner=st.sampled_from(OWNERS))
    def allocate(self, count: int, owner: str) -> None:
        free = self.units("free")
        evictable = [unit for unit in self.lru if not self.pins[unit]]
        if count > len(free) + len(evictable):
            with pytest.raises(OutOfUnits) as caught:
                self.region.allocate(count, owner)
            assert caught.value.available == len(free) + len(evictable)
            assert caught.value.can_ever_fit == (count <= SIZE - 1)
            return
        victims = evictable[: max(count - len(free), 0)]
        self.evicted.clear()
        self.last_words.clear()
        taken = self.region.allocate(count, owner)
        assert self.evicted == [self.keys[unit] for unit in victims], "L4: least recently used first, pinned never"
        assert self.last_words == [(self.keys[unit], unit) for unit in victims]
        assert set(taken) <= free | set(victims)
        assert len(set(taken)) == count
        for unit in victims:
            self.lru.remove(unit)
            del self.keys[unit]
        for unit in taken:
            self.owners[unit].add(owner)

    @rule(units=st.lists(UNITS, max_size=3), owner=st.sampled_from(OWNERS))
    def hold(self, units: list[int], owner: str) -> None:
        wanted = [unit for unit in units if 0 < unit < SIZE]
        if len(set(units)) != len(units):
            expected: type[PoolError] | None = AlreadyHeld
        elif len(wanted) != len(units) or any(self.state(unit) in ("free", "draining") for unit in units):
            expected = PoolError
        elif any(owner in self.owners[unit] for unit in units):
            expected = AlreadyHeld
        else:
            expected = None
        if expected:
            with pytest.raises(expected):
                self.region.hold(units, owner)
            return
        self.region.hold(units, owner)
        for unit in units:
            self.owners[unit].add(owner)
            if unit in self.lru:
                self.lru.remove(unit)

    @rule(units=st.lists(UNITS, max_size=3), owner=st.sampled_from(OWNERS))
    def release(self, units: list[int], owner: str) -> None:
        """L7: free exactly once; a double free is an error and changes nothing."""
        if len(set(units)) != len(units) or any(owner not in self.owners.get(unit, ()) for unit in units):
            with pytest.raises(NotHeld):
                self.region.release(units, owner)
            return
        self.region.release(units, owner)
        for unit in reversed(units):
            self.owners[unit].discard(owner)
            if self.state(unit) == "cached":
                self.lru.append(unit)

    @rule(unit=UNITS, pin=st.sampled_from(PINS))
    def pin(self, unit: int, pin: str) -> None:
        if not 0 < unit < SIZE or self.state(unit) == "free":
            with pytest.raises(BadUnit):
                self.region.pin([unit], pin)
            return
        self.region.pin([unit], pin)
        self.pins[unit].add(pin)

    @rule(unit=st.none() | UNITS, pin=st.sampled_from(PINS))
    def unpin(self, unit: int | None, pin: str) -> None:
        mine = {each for each, pins in self.pins.items() if pin in pins}
        if not mine or (unit is not None and unit not in mine):
            with pytest.raises(NotPinned):
                self.region.unpin(pin, None if unit is None else [unit])
            return
        self.region.unpin(pin, None if unit is None else [unit])
        for each in mine if unit is None else {unit}:
            self.pins[each].discard(pin)

    @rule(unit=UNITS, key=KEYS, owner=st.sampled_from(OWNERS))
    def set_key(self, unit: int, key: bytes, owner: str) -> None:
        if owner not in self.owners.get(unit, ()):
            with pytest.raises(NotHeld):
                self.region.set_key(unit, key, owner)
            return
        taken = {bound: each for each, bound in self.keys.items()}
        if taken.get(key, unit) != unit or self.keys.get(unit, key) != key:
            with pytest.raises(KeyConflict):
                self.region.set_key(unit, key, owner)
            return
        self.region.set_key(unit, key, owner)
        self.keys[unit] = key

    @rule(key=KEYS)
    def forget(self, key: bytes) -> None:
        bound = [unit for unit, each in self.keys.items() if each == key]
        assert self.region.forget(key) == bool(bound)
        for unit in bound:
            del self.keys[unit]
            if unit in self.lru:
                self.lru.remove(unit)

    @rule()
    def forget_all(self) -> None:
        """An operator erases: nothing is findable, what is held stays held, what is pinned stays in place."""
        assert self.region.named == len(self.keys)
        assert self.region.forget_all() == len(self.keys)
        self.keys.clear()
        self.lru.clear()

    @rule(units=st.lists(st.integers(1, SIZE - 1), max_size=3, unique=True))
    def touch(self, units: list[int]) -> None:
        self.region.touch(units)
        for unit in reversed(units):
            if unit in self.lru:
                self.lru.remove(unit)
                self.lru.append(unit)

    @precondition(lambda self: len(self.lru) > 2)
    @rule()
    def clear_cached(self) -> None:
        gone = [unit for unit in self.lru if not self.pins[unit]]
        assert self.region.clear_cached() == len(gone)
        for unit in gone:
            self.lru.remove(unit)
            del self.keys[unit]

    @invariant()
    def same_state(self) -> None:
        """L11: one state per unit, and every count is the size of a live set."""
        report = self.region.integrity()
        assert report.problems == ()
        counted = {state: len(self.units(state)) for state in ("free", "held", "draining", "cached")}
        assert (report.free, report.held, report.draining, report.cached) == tuple(counted.values())
        assert report.free + report.held + report.draining + report.cached == report.capacity == SIZE - 1
        assert report.pinned == sum(bool(pins) for pins in self.pins.values())
        assert report.references == sum(len(owners) for owners in self.owners.values())
        assert report.idle == (counted["held"] == counted["draining"] == 0 and report.pinned == 0)
        assert self.region.available == counted["free"] + sum(not self.pins[unit] for unit in self.lru)
        for unit, key in self.keys.items():
            assert self.region.find(key) == unit
            assert self.region.key_of(unit) == key
        for owner in OWNERS:
            assert self.region.held_by(owner) == {unit for unit, owners in self.owners.items() if owner in owners}
        for pin in PINS:
            assert self.region.pinned_by(pin) == {unit for unit, pins in self.pins.items() if pin in pins}


TestTwin = Twin.TestCase
TestTwin.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_unit_0_is_never_given_out() -> None:
    region = Region("rows", 4, reserve_first=True)
    assert sorted(region.allocate(3, "a")) == [1, 2, 3]
    assert sorted(Region("snapshots", 2, reserve_first=False).allocate(2, "a")) == [0, 1]


def test_a_suffix_is_evicted_before_its_prefix() -> None:
    """L4 with plain LRU: released in prefix order, the last block goes first."""
    region = Region("rows", 4, reserve_first=True)
    units = region.allocate(3, "a")
    for position, unit in enumerate(units):
        region.set_key(unit, bytes([position]) * 32, "a")
    gone: list[bytes] = []
    region.on_removed = gone.extend
    region.release(units, "a")
    region.allocate(2, "b")
    assert gone == [bytes([2]) * 32, bytes([1]) * 32]
    assert region.find(bytes(32)) == units[0]


def test_a_released_unit_waits_for_its_send() -> None:
    """L7: abort frees at once, the unit comes back only when the wire is quiet."""
    region = Region("rows", 2, reserve_first=True)
    units = region.allocate(1, "a")
    region.pin(units, "transfer-1")
    region.release(units, "a")
    assert region.integrity().draining == 1
    with pytest.raises(OutOfUnits):
        region.allocate(1, "b")
    region.unpin("transfer-1")
    assert region.allocate(1, "b") == units


def test_a_pinned_cached_unit_is_never_evicted() -> None:
    """L4: the oldest cached unit is read by a tier write, so a younger one goes."""
    region = Region("rows", 4, reserve_first=True)
    units = region.allocate(3, "a")
    for position, unit in enumerate(units):
        region.set_key(unit, bytes([position]) * 32, "a")
        region.release((unit,), "a")
    region.pin(units[:1], "write-back")
    assert region.allocate(1, "b") == units[1:2]
    assert region.allocate(1, "b") == units[2:]
    with pytest.raises(OutOfUnits):
        region.allocate(1, "b")
    assert region.clear_cached() == 0
    region.unpin("write-back")
    assert region.allocate(1, "b") == units[:1]


def damaged(damage: str) -> Region:
    region: Any = Region("rows", 6, reserve_first=True)
    held, keyed, other = region.allocate(3, "a")
    region.set_key(keyed, b"k" * 32, "a")
    region.release((keyed,), "a")
    region.pin((other,), "p")
    region.release((other,), "a")
    match damage:
        case "lost":
            region._free.pop()
        case "twice free":
            region._free.append(region._free[-1])
        case "free and held":
            region._free.append(held)
        case "reserved free":
            region._free.append(0)
        case "owner gone":
            region._held_by.clear()
        case "no owner left":
            region._owners_of[held].clear()
        case "pin gone":
            region._pinned_by.clear()
        case "draining unpinned":
            region._pins_of.clear()
            region._pinned_by.clear()
        case "key gone":
            region._key_of.clear()
        case "keys crossed":
            region._index_of[b"k" * 32] = held
        case "free with key":
            region._key_of[region._free[0]] = b"z" * 32
            region._index_of[b"z" * 32] = region._free[0]
    return region


@pytest.mark.parametrize(
    "damage",
    [
        "lost",
        "twice free",
        "free and held",
        "reserved free",
        "owner gone",
        "no owner left",
        "pin gone",
        "draining unpinned",
        "key gone",
        "keys crossed",
        "free with key",
    ],
)
def test_integrity_sees_damage(damage: str) -> None:
    """L11: a check that cannot fail is none; every kind of leak and double booking is reported."""
    assert damaged("nothing").integrity().sound
    assert damaged(damage).integrity().problems
