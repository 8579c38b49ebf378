"""The event log against a brute-force twin, and against a reader that knows only what it was sent (L24)."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.kvcache.cache_events import (
    BucketDropped,
    CacheChange,
    Cleared,
    NamespaceDropped,
    Removed,
    Stored,
    Tier,
)
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.event_log import EventLog, HeldEntries, Numbered, Source

BLOCK = 16
SOURCE = Source("prefill-0", "life-1")
NAMESPACES = (b"\x01" * 32, b"\x02" * 32)
BUCKETS = tuple(f"{space.hex()}/chat/{end}" for space in NAMESPACES for end in (100, 200))
LETTERS = "abcd"


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@st.composite
def changes(draw: st.DrawFn) -> CacheChange:
    """Any change over a few keys, so that they meet."""
    tier = draw(st.sampled_from(list(Tier)))
    kind = draw(st.sampled_from(list(EntryKind)))
    choice = draw(st.integers(0, 9))
    if choice == 0:
        return Cleared(tier)
    if choice == 1:
        return BucketDropped(draw(st.sampled_from(BUCKETS)))
    if choice == 2:
        return NamespaceDropped(draw(st.sampled_from(NAMESPACES)))
    if choice < 5:
        return Removed(kind, tier, tuple(key(n) for n in draw(st.lists(st.integers(1, 8), max_size=3, unique=True))))
    bucket = draw(st.sampled_from(BUCKETS)) if tier is Tier.STORE else ""
    first, count = draw(st.integers(1, 8)), 1 if kind is EntryKind.SNAPSHOT else draw(st.integers(1, 3))
    keys = tuple(key(first + index) for index in range(count))
    parent = None if kind is EntryKind.SNAPSHOT else key(first - 1)
    return Stored(kind, tier, keys, parent, (first + count - 1) * BLOCK, 64, bucket)


Entry = tuple[Tier, EntryKind, bytes]


class Twin:
    """What a list of events means, in the plainest words: one set, every event a comprehension over it."""

    def __init__(self) -> None:
        self.held: dict[Entry, str] = {}

    def apply(self, change: CacheChange) -> None:
        held = self.held
        if isinstance(change, Stored):
            for each in change.keys:
                held[change.tier, change.kind, each] = change.bucket
        elif isinstance(change, Removed):
            gone = {(change.tier, change.kind, each) for each in change.keys}
            self.held = {entry: bucket for entry, bucket in held.items() if entry not in gone}
        elif isinstance(change, BucketDropped):
            self.held = {e: b for e, b in held.items() if e[0] is not Tier.STORE or b != change.bucket}
        elif isinstance(change, NamespaceDropped):
            space = change.namespace.hex()
            self.held = {e: b for e, b in held.items() if e[0] is not Tier.STORE or b.split("/")[0] != space}
        else:
            self.held = {e: b for e, b in held.items() if e[0] is not change.tier}


def entries_of(held: HeldEntries) -> set[Entry]:
    return {(tier, kind, each) for tier in Tier for kind in EntryKind for each in held.keys(tier, kind)}


class Reader:
    """A remote index in small: follows by sequence, takes a snapshot on a gap."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.held = HeldEntries(BLOCK)
        self.next = 1
        self.incarnation = ""
        self.gaps = 0

    def follow(self, most_keys: int) -> None:
        read = self.log.read(self.next, self.incarnation, most_keys=most_keys)
        self.incarnation = self.log.source.incarnation
        if read.gap:
            self.gaps += 1
            snapshot = self.log.snapshot()
            self.held = HeldEntries(BLOCK)
            for stored in snapshot.entries:
                self.held.apply(stored)
            self.next = snapshot.watermark + 1
            return
        assert [event.sequence for event in read.events] == list(range(self.next, read.next_sequence))
        for event in read.events:
            self.held.apply(event.change)
        self.next = read.next_sequence


class Watched(RuleBasedStateMachine):
    """Events come; two readers, one of them lazy, follow in pieces of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.log = EventLog(SOURCE, BLOCK, kept_keys=6)
        self.twin = Twin()
        self.history: list[CacheChange] = []
        self.readers = [Reader(self.log), Reader(self.log)]

    @rule(change=changes())
    def happen(self, change: CacheChange) -> None:
        self.log.append(change)
        self.twin.apply(change)
        self.history.append(change)

    @rule(who=st.integers(0, 1), most_keys=st.integers(1, 4))
    def follow(self, who: int, most_keys: int) -> None:
        self.readers[who].follow(most_keys)

    @rule(start=st.integers(0, 40), most_keys=st.integers(1, 9))
    def read_anywhere(self, start: int, most_keys: int) -> None:
        """Events are those of the history, or the answer is a gap and they are kept no more (or not there yet)."""
        read = self.log.read(start, SOURCE.incarnation, most_keys=most_keys)
        at, end = max(start, 1), len(self.history) + 1
        kept_from = end - self.log.kept
        assert read.gap == (not kept_from <= at <= end)
        if read.gap:
            assert read.events == ()
            assert read.next_sequence == end
            return
        expected = tuple(Numbered(at + index, one) for index, one in enumerate(self.history[at - 1 :]))
        assert read.events == expected[: len(read.events)]
        assert bool(read.events) == bool(expected), "something is told where something is there"

    @invariant()
    def snapshot_is_the_history(self) -> None:
        snapshot = self.log.snapshot()
        assert snapshot.watermark == len(self.history) == self.log.last_sequence
        told = {(one.tier, one.kind, each): one.bucket for one in snapshot.entries for each in one.keys}
        assert told == self.twin.held

    @invariant()
    def bounded(self) -> None:
        """L24: at most six keys, or one event that is larger."""
        assert self.log.kept <= 6

    def teardown(self) -> None:
        for reader in self.readers:
            while reader.next <= self.log.last_sequence:
                reader.follow(4)
            assert entries_of(reader.held) == set(self.twin.held), f"after {reader.gaps} gaps"


TestWatched = Watched.TestCase
TestWatched.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@given(st.lists(changes(), max_size=12))
def test_events_are_idempotent(history: list[CacheChange]) -> None:
    """Applying each event twice in a row changes nothing, so that a fuzzy snapshot and its events agree."""
    once, twice = HeldEntries(BLOCK), HeldEntries(BLOCK)
    for change in history:
        once.apply(change)
        twice.apply(change)
        twice.apply(change)
    assert entries_of(once) == entries_of(twice)


@given(st.lists(changes(), max_size=20), st.data())
def test_a_listing_that_changes_meanwhile_is_put_right_by_the_events_behind_it(
    history: list[CacheChange], data: st.DataObject
) -> None:
    """A store lists its index while it changes: whatever of the listing was true at some moment since the watermark,
    snapshot and events give the state. (Removals after which a key is stored anew are in the events too.)"""
    at = data.draw(st.integers(0, len(history)))
    held = Twin()
    moments: list[dict[Entry, str]] = []
    for index, change in enumerate(history):
        if index >= at:
            moments.append(dict(held.held))
        held.apply(change)
    moments.append(dict(held.held))
    seen = {entry for moment in moments for entry in moment}
    listing = HeldEntries(BLOCK)
    for entry in sorted(seen):
        moment = data.draw(st.sampled_from(moments))
        if entry in moment:
            tier, kind, each = entry
            listing.apply(Stored(kind, tier, (each,), None, BLOCK, 64, moment[entry]))
    for change in history[at:]:
        listing.apply(change)
    assert entries_of(listing) == set(held.held)


def test_another_life_is_a_gap() -> None:
    """L14: sequences of two incarnations do not compare."""
    log = EventLog(SOURCE, BLOCK)
    log.append(Cleared(Tier.HOST))
    assert log.read(1, "life-0").gap
    assert not log.read(1, "life-1").gap
    assert not log.read(1).gap
    assert log.read(3, "life-1").gap, "a position that was never told"


def test_snapshot_joins_chains() -> None:
    """Blocks that follow each other share an event; positions and parents survive."""
    log = EventLog(SOURCE, BLOCK)
    log.append(Stored(EntryKind.BLOCK, Tier.DEVICE, (key(1), key(2)), key(0), 2 * BLOCK, 64))
    log.append(Stored(EntryKind.BLOCK, Tier.DEVICE, (key(3),), key(2), 3 * BLOCK, 64))
    log.append(Stored(EntryKind.BLOCK, Tier.DEVICE, (key(9),), key(7), 3 * BLOCK, 64))
    log.append(Stored(EntryKind.SNAPSHOT, Tier.DEVICE, (key(5),), None, 3 * BLOCK, 640))
    assert list(log.snapshot([Tier.DEVICE]).entries) == [
        Stored(EntryKind.BLOCK, Tier.DEVICE, (key(1), key(2), key(3)), key(0), 3 * BLOCK, 64),
        Stored(EntryKind.BLOCK, Tier.DEVICE, (key(9),), key(7), 3 * BLOCK, 64),
        Stored(EntryKind.SNAPSHOT, Tier.DEVICE, (key(5),), None, 3 * BLOCK, 640),
    ]
    assert list(log.snapshot([Tier.HOST]).entries) == []


def test_snapshots_agree_with_events_while_four_threads_append() -> None:
    """L24: from any snapshot's watermark on, the events give the end."""
    log = EventLog(SOURCE, BLOCK, kept_keys=1 << 20)
    start = threading.Barrier(5)

    def work(thread: int) -> None:
        start.wait()
        for index in range(400):
            each = key(1 + (thread * 400 + index) % 97)
            if index % 3:
                log.append(Stored(EntryKind.BLOCK, Tier.DEVICE, (each,), None, BLOCK, 64))
            else:
                log.append(Removed(EntryKind.BLOCK, Tier.DEVICE, (each,)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    snapshots = [log.snapshot() for _ in range(50)]
    for thread in threads:
        thread.join()
    everything = log.read(1, most_keys=1 << 20)
    assert [event.sequence for event in everything.events] == list(range(1, 1601))
    final = HeldEntries(BLOCK)
    for event in everything.events:
        final.apply(event.change)
    for snapshot in snapshots:
        held = HeldEntries(BLOCK)
        for stored in snapshot.entries:
            held.apply(stored)
        for event in everything.events[snapshot.watermark :]:
            held.apply(event.change)
        assert entries_of(held) == entries_of(final)


def test_listeners_are_woken_until_they_end() -> None:
    log = EventLog(SOURCE, BLOCK)
    woken: list[int] = []
    end = log.listen(lambda: woken.append(log.last_sequence))
    log.append(Cleared(Tier.HOST))
    log.append(Cleared(Tier.HOST))
    end()
    log.append(Cleared(Tier.HOST))
    assert woken == [1, 2], "after the event can be read"


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="kept_keys"):
        EventLog(SOURCE, BLOCK, kept_keys=0)
    with pytest.raises(ValueError, match="block_tokens"):
        HeldEntries(0)
