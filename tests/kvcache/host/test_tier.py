"""The host tier: what is put is read back verified, pinned places stay, books agree after any order of calls."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.kvcache.cache_events import CacheChange, Cleared, Removed, Stored, Tier
from headrace.kvcache.entries import EntryInfo, EntryKind, Loaded, Miss, RetentionClass, payload_digest
from headrace.kvcache.host.arena import HostTierError, arena_shape
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.memory import buffer_of, host_slabs

BLOCK, SNAPSHOT = 1000, 4100
"""A slab of 8 KiB holds eight blocks or one snapshot."""
SLAB = 8192
FAR = float("inf")


def key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def entry(
    name: str, parent: str = "root", *, kind: EntryKind = EntryKind.BLOCK, namespace: bytes = bytes(32), tenant: int = 0
) -> tuple[EntryInfo, bytes]:
    size = BLOCK if kind is EntryKind.BLOCK else SNAPSHOT
    payload = (key(name) * (size // 32 + 1))[:size]
    info = EntryInfo(
        key=key(name),
        kind=kind,
        namespace=namespace,
        parent=key(parent),
        tokens=128,
        length=size,
        digest=payload_digest(payload),
        retention=RetentionClass.CHAT,
        tenant_tag=bytes([tenant]) * 16,
    )
    return info, payload


class World:
    def __init__(self, slabs: int) -> None:
        self.changes: list[CacheChange] = []
        self.now = 0.0
        self.shape = arena_shape(slabs * SLAB, BLOCK, SNAPSHOT)
        self.memory = buffer_of(host_slabs(self.shape.slabs, self.shape.slab_bytes))
        self.tier = HostTier(self.memory, self.shape, events=self.changes.append, clock=lambda: self.now)

    def put(self, name: str, parent: str = "root", **more: Any) -> bool:
        return self.tier.put(*entry(name, parent, **more))

    def get(self, name: str) -> Any:
        (result,) = self.tier.get_many([key(name)], FAR)
        return result

    def has(self, name: str) -> bool:
        return self.tier.lookup([key(name)], FAR)[0]

    def present(self) -> set[bytes]:
        """As the events tell."""
        there: set[bytes] = set()
        for change in self.changes:
            if isinstance(change, Stored):
                there.update(change.keys)
            elif isinstance(change, Removed):
                assert there.issuperset(change.keys)
                there.difference_update(change.keys)
            elif isinstance(change, Cleared):
                there.clear()
        return there


@pytest.fixture
def world() -> Iterator[World]:
    made = World(3)
    yield made
    assert made.tier.integrity().idle, made.tier.integrity()


def test_what_is_put_is_read_back(world: World) -> None:
    """L4: announced once it is there."""
    info, payload = entry("a")
    assert world.tier.put(info, payload)
    got = world.get("a")
    assert isinstance(got, Loaded)
    assert (got.info, bytes(got.payload), got.payload.readonly) == (info, payload, True)
    got.release()
    assert world.changes == [Stored(EntryKind.BLOCK, Tier.HOST, (info.key,), info.parent, 128, BLOCK)]
    assert world.get("b") is Miss.ABSENT
    stats = world.tier.stats()
    assert (stats.hits, stats.misses, stats.blocks, stats.payload_bytes) == (1, {Miss.ABSENT: 1}, 1, BLOCK)


def test_a_second_put_copies_nothing(world: World) -> None:
    assert world.tier.wants(key("a"))
    assert world.put("a")
    assert not world.tier.wants(key("a"))
    assert world.put("a")
    assert (world.tier.stats().stored, world.tier.stats().known, len(world.changes)) == (1, 1, 1)


def test_an_entry_of_another_size_is_refused(world: World) -> None:
    info, payload = entry("a")
    with pytest.raises(HostTierError, match="1000"):
        world.tier.put(info, payload[:-1])
    assert world.tier.integrity().entries == 0


def test_bad_bytes_are_a_miss_and_leave(world: World) -> None:
    """L3: the digest is verified at every hit; a page that fails is dropped and counted."""
    world.put("a")
    world.memory[world.tier.shape.slab_bytes * (world.tier.shape.slabs - 1)] = 0
    for offset in range(0, len(world.memory), BLOCK):
        world.memory[offset] ^= 1
    assert world.get("a") is Miss.DIGEST
    assert world.get("a") is Miss.ABSENT
    assert isinstance(world.changes[-1], Removed)
    assert world.tier.stats().bad == 1


def test_a_pin_is_released_once(world: World) -> None:
    """L7."""
    world.put("a")
    got = world.get("a")
    got.release()
    with pytest.raises(HostTierError, match="ended"):
        got.release()


def test_past_the_deadline_everything_is_a_timeout(world: World) -> None:
    """L6."""
    world.put("a")
    world.now = 5.0
    assert world.tier.get_many([key("a"), key("b")], 5.0) == [Miss.TIMEOUT, Miss.TIMEOUT]


def test_a_full_tier_never_evicts_what_is_pinned(world: World) -> None:
    """L4, L7: with everything pinned a put is refused; a reader's bytes stay."""
    names = [f"b{number}" for number in range(24)]
    held = []
    for name in names:
        assert world.put(name)
        held.append(world.get(name))
    assert not world.put("more")
    assert not world.put("snapshot", kind=EntryKind.SNAPSHOT)
    assert world.tier.stats().no_room == 2
    assert all(bytes(got.payload) == entry(name)[1] for got, name in zip(held, names, strict=True))
    held[5].release()
    assert world.put("more")
    assert not world.has("b5")
    for got in held[:5] + held[6:]:
        got.release()


def test_what_is_dropped_under_a_reader_stays_until_it_is_done(world: World) -> None:
    """L7: findable no more at once, freed and erased with the last pin."""
    world.put("a", tenant=1)
    world.put("b", tenant=2)
    got = world.get("a")
    assert world.tier.drop_tenant(bytes([1]) * 16) == 1
    assert world.get("a") is Miss.ABSENT
    assert bytes(got.payload) == entry("a")[1]
    assert world.tier.integrity().draining == 1
    got.release()
    assert bytes(got.payload) == bytes(BLOCK)
    assert world.has("b")


def test_drops_by_namespace_and_clear(world: World) -> None:
    for number in range(6):
        world.put(f"b{number}", namespace=bytes([number % 2]) * 32)
    assert world.tier.drop_namespace(bytes([1]) * 32) == 3
    assert [world.has(f"b{number}") for number in range(6)] == [True, False] * 3
    assert world.tier.remove([key("b0"), key("b1")]) == 1
    world.changes.clear()
    assert world.tier.clear() == 2
    assert world.changes == [Cleared(Tier.HOST)], "one word for all"
    assert world.present() == set()
    assert world.tier.stats().payload_bytes == 0


def test_a_suffix_leaves_before_its_prefix(world: World) -> None:
    """L4: of a chain put prefix first, whatever remains is a prefix."""
    chain = [f"c{number}" for number in range(24)]
    for parent, name in zip(["root", *chain], chain, strict=False):
        world.put(name, parent)
    for number in range(10):
        world.put(f"x{number}")
        there = [world.has(name) for name in chain]
        assert there == sorted(there, reverse=True)
    assert there.count(True) == 14


def test_a_suffix_put_while_its_prefix_is_leaving(world: World) -> None:
    """L4: what is new hangs on what was about to leave, and leaves first."""
    chain = [f"c{number}" for number in range(24)]
    for parent, name in zip(["root", *chain], chain, strict=False):
        world.put(name, parent)
    world.put("x")
    world.put("fork", "c10")
    assert world.has("fork")
    for number in range(14):
        world.put(f"y{number}")
        assert world.has("c10") or not world.has("fork")
    assert not world.has("fork")


def test_a_leaf_does_not_leave_to_make_room_for_its_own_suffix(world: World) -> None:
    """L4."""
    for number in range(24):
        world.put(f"b{number}")
    assert world.put("suffix", "b0")
    assert world.has("b0")


def test_a_snapshot_makes_itself_a_slab(world: World) -> None:
    """Blocks that stay are moved together; nobody has to guess the ratio of the two kinds."""
    for number in range(24):
        world.put(f"b{number}")
    assert world.put("snapshot", "b23", kind=EntryKind.SNAPSHOT)
    stats = world.tier.stats()
    assert (stats.blocks, stats.snapshots, stats.evicted_blocks) == (16, 1, 8)
    for number in range(24):
        got = world.get(f"b{number}")
        if isinstance(got, Loaded):
            assert bytes(got.payload) == entry(f"b{number}")[1]
            got.release()


def test_scattered_free_units_become_a_slab_by_moving(world: World) -> None:
    for number in range(24):
        world.put(f"b{number}")
    world.tier.remove([key(f"b{number}") for number in range(0, 24, 2)])
    assert world.put("snapshot", kind=EntryKind.SNAPSHOT)
    stats = world.tier.stats()
    assert (stats.blocks, stats.evicted_blocks, stats.moved) == (12, 0, 4)
    for number in range(1, 24, 2):
        got = world.get(f"b{number}")
        assert bytes(got.payload) == entry(f"b{number}")[1]
        got.release()


def test_a_used_prefix_outlives_what_was_seen_once(world: World) -> None:
    for number in range(3):
        world.put(f"hot{number}", f"hot{number - 1}")
    for _ in range(2):
        world.tier.touch([key(f"hot{number}") for number in range(3)])
    for number in range(200):
        world.put(f"once{number}")
    assert all(world.has(f"hot{number}") for number in range(3))


def test_a_tier_without_memory_misses() -> None:
    world = World(0)
    assert not world.put("a")
    assert world.get("a") is Miss.ABSENT
    assert not world.tier.wants(key("a"))
    assert world.tier.integrity().idle


def test_a_model_without_snapshots_has_no_place_for_one() -> None:
    shape = arena_shape(4 * SLAB, SLAB, 0)
    tier = HostTier(buffer_of(host_slabs(shape.slabs, shape.slab_bytes)), shape)
    info, payload = entry("s", kind=EntryKind.SNAPSHOT)
    with pytest.raises(HostTierError, match="snapshot"):
        tier.put(info, payload)


def test_many_threads_see_right_bytes_only(world: World) -> None:
    """L3: four threads put, read and drop; every payload read is the one of its key."""
    names = [f"b{number}" for number in range(60)]
    wrong: list[str] = []

    def work(offset: int) -> None:
        for step in range(300):
            name = names[(step * 7 + offset * 13) % len(names)]
            world.put(name)
            got = world.get(name)
            if isinstance(got, Loaded):
                if bytes(got.payload) != entry(name)[1]:
                    wrong.append(name)
                got.release()
            elif got is not Miss.ABSENT:
                wrong.append(f"{name}: {got}")
            if step % 50 == offset:
                world.put(f"s{step}{offset}", kind=EntryKind.SNAPSHOT)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert world.present() == {key(name) for name in names if world.has(name)} | {
        key(f"s{step}{offset}") for step in range(300) for offset in range(4) if world.has(f"s{step}{offset}")
    }


NAMES = st.integers(0, 40)


class Fuzz(RuleBasedStateMachine):
    """L7, L11: any order of put, get, release, drop and eviction; a dict of what was put is the twin."""

    @initialize(slabs=st.integers(1, 4))
    def start(self, slabs: int) -> None:
        self.world = World(slabs)
        self.held: list[tuple[str, Loaded]] = []
        self.tenants: dict[str, int] = {}
        self.parents: dict[bytes, bytes] = {}

    @rule(number=NAMES, parent=NAMES, snapshot=st.booleans(), tenant=st.integers(0, 2))
    def put(self, number: int, parent: int, snapshot: bool, tenant: int) -> None:
        name = f"{'s' if snapshot else 'b'}{number}"
        kind = EntryKind.SNAPSHOT if snapshot else EntryKind.BLOCK
        known = self.world.has(name)
        needs = f"b{min(parent, number - 1)}"
        before = len(self.world.changes)
        there = self.world.put(name, needs, kind=kind, tenant=tenant)
        assert there == self.world.has(name)
        if there and not known:
            self.parents[key(name)] = key(needs)
        evicted = {
            gone for change in self.world.changes[before:] if isinstance(change, Removed) for gone in change.keys
        }
        stranded = {each for each in self.world.present() if self.parents[each] in evicted}
        assert not stranded, "L4: a prefix left before its suffix"
        if there and not known:
            self.tenants[name] = tenant

    @rule(number=NAMES, snapshot=st.booleans())
    def get(self, number: int, snapshot: bool) -> None:
        name = f"{'s' if snapshot else 'b'}{number}"
        there = self.world.has(name)
        got = self.world.get(name)
        assert isinstance(got, Loaded) == there
        if isinstance(got, Loaded):
            self.held.append((name, got))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, got = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        got.release()

    @rule(tenant=st.integers(0, 2))
    def drop_tenant(self, tenant: int) -> None:
        self.world.tier.drop_tenant(bytes([tenant]) * 16)
        assert not any(self.world.has(name) for name, owner in self.tenants.items() if owner == tenant)

    @rule()
    def clear(self) -> None:
        self.world.tier.clear()
        assert self.world.tier.stats().payload_bytes == 0

    @invariant()
    def books_agree(self) -> None:
        found = self.world.tier.integrity()
        assert found.sound, found.problems
        assert found.pins == len(self.held)
        assert len(self.world.present()) == found.entries

    @invariant()
    def readers_keep_their_bytes(self) -> None:
        for name, got in self.held:
            kind = EntryKind.SNAPSHOT if name[0] == "s" else EntryKind.BLOCK
            assert bytes(got.payload) == entry(name, kind=kind)[1]

    def teardown(self) -> None:
        for _, got in getattr(self, "held", []):
            got.release()
        if hasattr(self, "world"):
            assert self.world.tier.integrity().idle


TestFuzz = Fuzz.TestCase
TestFuzz.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
