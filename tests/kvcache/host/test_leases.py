"""Leases on the host tier: what is leased stays in place, for as long as the lessor's clock says."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.kvcache.entries import EntryInfo, EntryKind, RetentionClass, payload_digest
from headrace.kvcache.host.arena import arena_shape
from headrace.kvcache.host.leases import Lease, LeaseEnded, LeaseRefused, LeaseTable
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.memory import buffer_of, host_slabs

BLOCK = 4096


def entry(number: int) -> tuple[EntryInfo, bytes]:
    key = hashlib.sha256(bytes([number])).digest()
    payload = key * (BLOCK // 32)
    digest = payload_digest(payload)
    info = EntryInfo(key, EntryKind.BLOCK, bytes(32), bytes(32), 128, BLOCK, digest, RetentionClass.CHAT, bytes(16))
    return info, payload


def key(number: int) -> bytes:
    return entry(number)[0].key


class World:
    def __init__(self, slabs: int = 8, **more: int) -> None:
        self.now = 100.0
        shape = arena_shape(slabs * BLOCK, BLOCK, 0)
        self.memory = buffer_of(host_slabs(shape.slabs, shape.slab_bytes))
        self.tier = HostTier(self.memory, shape)
        self.leases = LeaseTable(self.tier, max_seconds=5.0, clock=lambda: self.now, **{"max_bytes": 1 << 20, **more})

    def put(self, *numbers: int) -> list[bool]:
        return [self.tier.put(*entry(number)) for number in numbers]

    def bytes_at(self, offset: int) -> bytes:
        return bytes(self.memory[offset : offset + BLOCK])

    def adds_up(self) -> bool:
        stats = self.leases.stats()
        return stats.granted == stats.live + stats.released + stats.expired + stats.bereaved


def test_a_lease_says_where_and_keeps_it_there() -> None:
    world = World()
    world.put(*range(8))
    lease = world.leases.grant("r", [key(1), key(99), key(3), key(1)], 1.0)
    assert lease is not None
    assert [pinned.info.key for pinned in lease.entries] == [key(1), key(3)]
    world.put(*range(10, 40))
    for pinned, number in zip(lease.entries, (1, 3), strict=True):
        assert world.bytes_at(pinned.offset) == entry(number)[1]
    assert world.leases.release("r", lease.id)
    assert not world.leases.release("r", lease.id), "idempotent"
    assert world.tier.integrity().idle


def test_a_lease_ends_by_the_lessors_clock() -> None:
    """L1, L8: then the place may get another payload, of a higher generation and another digest."""
    world = World(slabs=1)
    world.put(1)
    lease = world.leases.grant("r", [key(1)], 60.0)
    assert lease is not None
    assert lease.seconds == 5.0, "no longer than the lessor allows"
    assert world.put(2) == [False], "pinned"
    world.now += 4.9
    assert world.leases.expire() == 0
    world.now += 0.2
    assert world.leases.expire() == 1
    assert world.put(2) == [True]
    again = world.leases.grant("r", [key(2)], 1.0)
    assert again is not None
    assert again.entries[0].offset == lease.entries[0].offset
    assert again.entries[0].generation > lease.entries[0].generation
    assert payload_digest(world.bytes_at(lease.entries[0].offset)) != lease.entries[0].info.digest


def test_what_this_process_sends_stays_until_the_wire_is_quiet() -> None:
    """L7: also after the lease's end."""
    world = World(slabs=1)
    world.put(1)
    lease = world.leases.grant("r", [key(1)], 1.0)
    assert lease is not None
    _, done = world.leases.begin_send("r", lease.id)
    world.now += 2.0
    assert world.leases.expire() == 1
    assert (world.leases.stats().live, world.leases.stats().sending) == (0, 1)
    assert world.put(2) == [False]
    with pytest.raises(LeaseEnded):
        world.leases.begin_send("r", lease.id)
    done()
    assert world.put(2) == [True]
    assert world.leases.stats().leased_bytes == 0


def test_a_lease_is_its_readers() -> None:
    world = World()
    world.put(1)
    lease = world.leases.grant("r", [key(1)], 1.0)
    assert lease is not None
    assert not world.leases.release("other", lease.id)
    with pytest.raises(LeaseEnded):
        world.leases.begin_send("other", lease.id)
    world.now += 1.0
    with pytest.raises(LeaseEnded):
        world.leases.begin_send("r", lease.id)


def test_a_dead_readers_leases_end() -> None:
    """L8."""
    world = World()
    world.put(1, 2)
    for reader in ("dead", "dead", "alive"):
        assert world.leases.grant(reader, [key(1)], 1.0)
    assert world.leases.reader_died("dead") == 2
    assert world.leases.stats().live == 1


def test_leases_are_bounded() -> None:
    """L12: in number, and in what they keep from being reused."""
    world = World(max_leases=2, max_bytes=3 * BLOCK)
    world.put(*range(6))
    first = world.leases.grant("r", [key(number) for number in range(6)], 1.0)
    assert first is not None
    assert len(first.entries) == 3, "leading keys first"
    assert world.leases.grant("r", [key(5)], 1.0) is None
    world.leases.release("r", first.id)
    assert world.leases.grant("r", [key(1)], 1.0)
    assert world.leases.grant("r", [key(2)], 1.0)
    with pytest.raises(LeaseRefused):
        world.leases.grant("r", [key(3)], 1.0)
    assert world.leases.stats().refused == 1


def test_what_is_dropped_under_a_lease_is_still_right() -> None:
    world = World()
    world.put(1)
    lease = world.leases.grant("r", [key(1)], 1.0)
    assert lease is not None
    world.tier.clear()
    world.put(*range(2, 9))
    assert world.bytes_at(lease.entries[0].offset) == entry(1)[1]
    assert world.leases.release("r", lease.id)
    assert world.tier.integrity().idle


class Fuzz(RuleBasedStateMachine):
    """L7, L11: any order of put, lease, send, release, expiry and death."""

    @initialize()
    def start(self) -> None:
        self.world = World(slabs=5, max_leases=6)
        self.leased: list[Lease] = []
        self.sends: list[tuple[Lease, object]] = []

    @rule(number=st.integers(0, 12))
    def put(self, number: int) -> None:
        self.world.put(number)

    @rule(numbers=st.lists(st.integers(0, 12), max_size=3), reader=st.sampled_from("ab"), seconds=st.floats(0.1, 9))
    def lease(self, numbers: list[int], reader: str, seconds: float) -> None:
        try:
            lease = self.world.leases.grant(reader, [key(number) for number in numbers], seconds)
        except LeaseRefused:
            return
        if lease is not None:
            self.leased.append(lease)

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leased))
        self.world.leases.release(lease.reader, lease.id)

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leased))
        try:
            self.sends.append(self.world.leases.begin_send(lease.reader, lease.id))
        except LeaseEnded:
            return

    @precondition(lambda self: self.sends)
    @rule(data=st.data())
    def sent(self, data: st.DataObject) -> None:
        _, done = self.sends.pop(data.draw(st.integers(0, len(self.sends) - 1)))
        assert callable(done)
        done()

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.leases.expire()

    @rule(reader=st.sampled_from("ab"))
    def die(self, reader: str) -> None:
        self.world.leases.reader_died(reader)

    @rule()
    def clear(self) -> None:
        self.world.tier.clear()

    @invariant()
    def adds_up(self) -> None:
        assert self.world.adds_up()
        assert self.world.tier.integrity().sound

    @invariant()
    def what_is_sent_is_in_place(self) -> None:
        for lease, _ in self.sends:
            for pinned in lease.entries:
                assert payload_digest(self.world.bytes_at(pinned.offset)) == pinned.info.digest

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for _, done in self.sends:
                assert callable(done)
                done()
            self.world.now += 100
            self.world.leases.expire()
            assert self.world.tier.integrity().idle
            assert self.world.leases.stats().leased_bytes == 0


TestFuzz = Fuzz.TestCase
TestFuzz.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
