"""Peers as a tier source, over a wire that the test plays: whom it asks, what it believes, what it gives back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from headrace.kvcache.entries import EntryInfo, EntryKind, Loaded, Miss, RetentionClass, payload_digest
from headrace.kvcache.host.arena import HostTierError, arena_shape
from headrace.kvcache.host.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breakers
from headrace.kvcache.host.buffer import FetchBuffer, Unit
from headrace.kvcache.host.peers import Arrival, Fetching, Granted, PeerHostSource, PeerUnreachable, RemoteEntry
from headrace.kvcache.memory import buffer_of, host_slabs

BLOCK = 4096
DEAD = PeerUnreachable("dead")


def entry(number: int) -> tuple[EntryInfo, bytes]:
    key = hashlib.sha256(bytes([number])).digest()
    payload = key * (BLOCK // 32)
    digest = payload_digest(payload)
    info = EntryInfo(key, EntryKind.BLOCK, bytes(32), bytes(32), 128, BLOCK, digest, RetentionClass.CHAT, bytes(16))
    return info, payload


def keys(*numbers: int) -> list[bytes]:
    return [entry(number)[0].key for number in numbers]


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    elif value is not ...:
        future.set_result(value)
    return future


class FakeWire:
    """Peers by name; each has numbers, or fails."""

    def __init__(self, buffer: memoryview, **peers: set[int]) -> None:
        self.buffer = buffer
        self.peers = peers
        self.broken: dict[str, Any] = {}
        """Peer → what its calls end with; `...` never ends."""
        self.fetch_ends: Any = None
        self.quiet = True
        self.fetches: list[Fetching] = []
        self.spoil: dict[bytes, Any] = {}
        """Key → another info to tell, or other bytes to deliver."""
        self.calls: list[tuple[str, str, int]] = []
        self.out: set[str] = set()
        self.leases = 0

    def candidates(self) -> Sequence[str]:
        return tuple(self.peers)

    def _has(self, peer: str) -> dict[bytes, tuple[EntryInfo, bytes]]:
        return {entry(number)[0].key: entry(number) for number in self.peers[peer]}

    def lookup(self, peer: str, wanted: Sequence[bytes], timeout_s: float) -> Future[Any]:
        self.calls.append(("lookup", peer, len(wanted)))
        return done(self.broken.get(peer, [key in self._has(peer) for key in wanted]))

    def lease(self, peer: str, wanted: Sequence[bytes], seconds: float, timeout_s: float) -> Future[Any]:
        self.calls.append(("lease", peer, len(wanted)))
        if peer in self.broken:
            return done(self.broken[peer])
        has = self._has(peer)
        told = [
            self.spoil[key] if isinstance(self.spoil.get(key), EntryInfo) else has[key][0]
            for key in wanted
            if key in has
        ]
        self.leases += 1
        granted = Granted(str(self.leases) if told else "", tuple(RemoteEntry(info, 0, 1) for info in told))
        if granted.id:
            self.out.add(granted.id)
        return done(granted)

    def fetch(self, peer: str, lease: Granted, arrivals: Sequence[Arrival], timeout_s: float) -> Fetching:
        self.calls.append(("fetch", peer, len(arrivals)))
        fetching = Fetching(done(self.fetch_ends), done(None if self.quiet else ...))
        self.fetches.append(fetching)
        if self.fetch_ends is None:
            for each in arrivals:
                key = each.entry.info.key
                payload = self.spoil.get(key, self._has(peer)[key][1])
                self.buffer[each.offset : each.offset + BLOCK] = payload
        return fetching

    def release(self, peer: str, lease: Granted) -> None:
        self.out.remove(lease.id)


class World:
    def __init__(self, *, slabs: int = 8, max_peers: int = 4, **peers: set[int]) -> None:
        self.now = 10.0
        shape = arena_shape(slabs * BLOCK, BLOCK, 0)
        memory = buffer_of(host_slabs(shape.slabs, shape.slab_bytes))
        self.buffer = FetchBuffer(memory, shape)
        self.wire = FakeWire(memory, **peers)
        self.source = PeerHostSource(self.wire, self.buffer, max_peers=max_peers, clock=lambda: self.now)

    def get(self, *numbers: int) -> list[Any]:
        """Payload bytes, given back; or misses."""
        results = self.source.get_many(keys(*numbers), self.now + 1.0)
        out: list[Any] = []
        for result in results:
            if isinstance(result, Loaded):
                out.append(bytes(result.payload))
                result.release()
            else:
                out.append(result)
        return out

    def idle(self) -> bool:
        stats = self.source.stats()
        return not (self.wire.out or stats.units_in_use or stats.units_quarantined or self.buffer.problems())


def test_each_peer_is_asked_once_for_all_it_has() -> None:
    world = World(a={1, 2, 3}, b={3, 4})
    assert world.source.lookup(keys(1, 2, 3, 4, 5), world.now + 1) == [True, True, True, True, False]
    world.wire.calls.clear()
    assert world.get(1, 2, 3, 4) == [entry(number)[1] for number in (1, 2, 3, 4)]
    assert world.wire.calls == [("lease", "a", 3), ("lease", "b", 1), ("fetch", "a", 3), ("fetch", "b", 1)]
    assert world.idle()
    assert (world.source.stats().hits, world.source.stats().nbytes) == (4, 4 * BLOCK)


def test_what_was_not_looked_up_is_looked_up() -> None:
    world = World(a={1})
    assert world.get(1, 2, 1) == [entry(1)[1], Miss.ABSENT, Miss.ABSENT]
    assert world.idle()


def test_other_bytes_and_other_entries_are_not_believed() -> None:
    """L1, L3: a reused place, an entry that was not asked for, one of another size."""
    world = World(a={1, 2, 3, 4})
    world.wire.spoil[keys(1)[0]] = bytes(BLOCK)
    world.wire.spoil[keys(2)[0]] = replace(entry(2)[0], length=BLOCK - 1)
    world.wire.spoil[keys(3)[0]] = entry(9)[0]
    assert world.get(1, 2, 3, 4) == [Miss.DIGEST, Miss.HEADER, Miss.ABSENT, entry(4)[1]]
    assert world.idle()


def test_a_dead_peer_among_others_is_decided_once() -> None:
    """L17: its keys are absent, the others' come; for the pause it is not asked at all."""
    world = World(a={1, 2}, b={3})
    world.source.lookup(keys(1, 2, 3), world.now + 1)
    world.wire.broken["a"] = DEAD
    assert world.get(1, 2, 3) == [Miss.ABSENT, Miss.ABSENT, entry(3)[1]]
    stats = world.source.stats()
    assert (stats.failures, stats.misses, stats.open_breakers) == (1, {Miss.NOT_CONNECTED: 2}, 1)
    world.wire.calls.clear()
    assert world.get(1, 2) == [Miss.ABSENT, Miss.ABSENT]
    assert all(peer == "b" for _, peer, _ in world.wire.calls)
    # L14: after the pause it is asked again.
    del world.wire.broken["a"]
    world.now += FIRST_PAUSE_S
    assert world.get(1, 2) == [entry(1)[1], entry(2)[1]]
    assert world.source.stats().open_breakers == 0


def test_no_peer_can_be_reached() -> None:
    world = World(a={1})
    world.source.lookup(keys(1), world.now + 1)
    world.wire.broken["a"] = DEAD
    assert world.get(1) == [Miss.NOT_CONNECTED]


def test_a_read_that_is_given_up_is_quarantined_until_the_wire_is_quiet() -> None:
    """L6, L7."""
    world = World(slabs=2, a={1, 2, 3})
    world.source.lookup(keys(1, 2, 3), world.now + 1)
    world.wire.fetch_ends, world.wire.quiet = DEAD, False
    assert world.get(1, 2) == [Miss.NOT_CONNECTED] * 2
    assert world.source.stats().units_quarantined == 2
    assert not world.wire.out, "the lease is given back"
    world.wire.fetch_ends, world.wire.quiet = None, True
    world.now += 1
    assert world.get(3) == [Miss.BUSY], "its units are nobody's"
    world.wire.fetches[0].terminal.set_result(None)
    assert world.source.stats().units_quarantined == 0
    assert world.get(3) == [entry(3)[1]]
    assert world.idle()


def test_a_payload_is_the_readers_until_it_is_released() -> None:
    world = World(slabs=1, a={1, 2})
    (held,) = world.source.get_many(keys(1), world.now + 1)
    assert isinstance(held, Loaded)
    assert world.get(2) == [Miss.BUSY]
    assert bytes(held.payload) == entry(1)[1]
    held.release()
    assert world.get(2) == [entry(2)[1]]
    with pytest.raises(HostTierError):
        held.release()


def test_a_lease_that_comes_too_late_is_given_back() -> None:
    """L10."""
    world = World(a={1})
    world.source.lookup(keys(1), world.now + 1)
    late: Future[Any] = Future()
    world.wire.lease = lambda *_: late  # type: ignore[method-assign]
    assert world.source.get_many(keys(1), world.now) == [Miss.TIMEOUT]
    world.wire.out.add("late")
    late.set_result(Granted("late", (RemoteEntry(entry(1)[0], 0, 1),)))
    assert world.idle()


def test_few_peers_are_asked_and_each_has_its_turn() -> None:
    """Bounded: useful ones first, the rest one after another."""
    world = World(max_peers=3, **{f"p{number}": {number} for number in range(8)})
    asked: set[str] = set()
    for _ in range(12):
        world.wire.calls.clear()
        world.source.lookup(keys(50), world.now + 1)
        assert len(world.wire.calls) == 3
        asked |= {peer for _, peer, _ in world.wire.calls}
    assert len(asked) == 8
    world.source.hint(keys(7), "p7")
    world.wire.calls.clear()
    assert world.source.lookup(keys(7), world.now + 1) == [True]
    assert world.wire.calls[0][1] == "p7"
    world.wire.calls.clear()
    world.source.lookup(keys(51), world.now + 1)
    assert world.wire.calls[0][1] == "p7", "it was of use lately"


def test_past_the_deadline_nobody_is_asked() -> None:
    """L6."""
    world = World(a={1})
    assert world.source.lookup(keys(1), world.now) == [False]
    assert world.wire.calls == []
    assert world.source.lookup([], world.now + 1) == []


def test_a_failing_peer_is_left_alone_for_longer_each_time() -> None:
    now = 0.0
    breakers = Breakers(lambda: now)
    pauses = []
    for _ in range(8):
        breakers.failed("a")
        breakers.failed("a")
        began = now
        while not breakers.allows("a"):
            now += 0.25
        pauses.append(now - began)
    assert pauses == [0.5, 1, 2, 4, 8, 8, 8, 8]
    assert pauses[0] == FIRST_PAUSE_S
    assert pauses[-1] == LONGEST_PAUSE_S
    breakers.failed("a")
    breakers.failed("b")
    breakers.answered("a")
    assert (breakers.allows("a"), breakers.open) == (True, 1)
    breakers.keep(frozenset({"a"}))
    assert breakers.open == 0


def test_a_buffer_counts_its_units() -> None:
    """L7, L11."""
    shape = arena_shape(2 * BLOCK, BLOCK, 0)
    buffer = FetchBuffer(buffer_of(host_slabs(shape.slabs, shape.slab_bytes)), shape)
    first, second = buffer.take(EntryKind.BLOCK), buffer.take(EntryKind.BLOCK)
    assert first is not None
    assert second is not None
    assert buffer.take(EntryKind.BLOCK) is None
    assert buffer.take(EntryKind.SNAPSHOT) is None
    buffer.quarantine(first)
    assert (buffer.stats().in_use, buffer.stats().quarantined) == (1, 1)
    assert buffer.problems() == ()
    buffer.give(first)
    buffer.give(second)
    for unit in (first, Unit(EntryKind.BLOCK, 99)):
        with pytest.raises(HostTierError):
            buffer.give(unit)
    assert (buffer.stats().in_use, buffer.stats().quarantined) == (0, 0)
    with pytest.raises(HostTierError, match="writable"):
        FetchBuffer(memoryview(bytearray(5)), shape)
