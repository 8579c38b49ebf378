"""The segment engine on mounts that lag, fail, come short, answer late and vanish."""

from __future__ import annotations

import errno
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from headrace.kvcache.cache_events import EventSink, ignore_events
from headrace.kvcache.entries import Loaded, Miss, RetentionClass
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.store.base import PutEntry, Store, StoreError, WallClock
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.record import record_bytes
from headrace.kvcache.store.segments.settings import SegmentSettings
from tests.kvcache.store.contract import OpenStore, StoreContract, closing, durable
from tests.kvcache.store.entries import block, consume, keys, prefix, soon
from tests.kvcache.store.threefs.hostile import NEGATIVE_S, SIZE_S, Clock, HostileMount, Server


class SharedIndex(DictIndex):
    """Like Redis it outlives the stores that use it."""

    def close(self) -> None:
        pass


_numbers = itertools.count(1)


def open_on(
    mount: HostileMount,
    index: SharedIndex,
    *,
    events: EventSink = ignore_events,
    wall: WallClock = time.time,
    queue_bytes: int = 8 << 20,
    alive: Callable[[str], bool] | None = None,
) -> Store:
    settings = SegmentSettings(
        boot=f"{next(_numbers):x}",
        segment_bytes=128 * 1024,
        queue_bytes=queue_bytes,
        read_buffer_bytes=4 << 20,
        read_threads=2,
        sync_idle_s=0.002,
        sweep_s=3600.0,
    )
    return SegmentStore(mount, index, settings, events=events, wall=wall, liveness=alive)


class TestOnAHostileMount(StoreContract):
    """With its lags and chunks, and no faults: the contract holds, clock standing still."""

    @pytest.fixture
    def engine(self) -> OpenStore:
        mount, index = HostileMount(Server(), Clock()), SharedIndex()

        def open_store(
            *, events: EventSink = ignore_events, wall: WallClock = time.time, queue_bytes: int = 64 << 20
        ) -> Store:
            return open_on(mount, index, events=events, wall=wall, queue_bytes=queue_bytes)

        return open_store


def test_a_segment_that_the_mount_denies_is_a_miss_and_not_a_loss() -> None:
    """L17. Host B looked for the directory before A made it, and is told for 5 s that it is not there; the rows in the
    shared index must outlive that, or an acknowledged record is lost by a look at it."""
    clock, server, index = Clock(), Server(), SharedIndex()
    here, there = HostileMount(server, clock), HostileMount(server, clock)
    entries = prefix("a", 3)
    with closing(open_on(there, index)) as b, closing(open_on(here, index)) as a:
        list(b.scan())  # B's mount has looked at a directory that is not there yet
        durable(a, list(entries))
        namespace = next(name for name in server.directories if name.startswith("v1/") and name.count("/") == 3)
        there._denied[namespace] = clock() + NEGATIVE_S
        assert consume(b.get_many(keys(entries), soon())) == [Miss.ABSENT] * len(entries)
        assert list(a.lookup(keys(entries), soon())) == [True] * len(entries)
        clock.now += NEGATIVE_S
        assert consume(b.get_many(keys(entries), soon())) == [entry.payload for entry in entries]


def test_adoption_does_not_believe_an_old_size() -> None:
    """Host B saw the segment when it was made, of no length, and remembers that for 30 s. Adopting it after A's death,
    B must find what A made durable, and cut nothing of it off."""
    clock, server, index = Clock(), Server(), SharedIndex()
    here, there = HostileMount(server, clock), HostileMount(server, clock)
    entries = prefix("a", 8, length=9_000)
    a = open_on(here, index)
    durable(a, list(entries))
    here.moods.gone = True  # A dies: nothing that it still does reaches the server
    server.held.clear()
    for path in server.files:
        if path.endswith(".seg"):
            there._sizes[path] = (clock() + SIZE_S, 0)
    with closing(open_on(there, SharedIndex(), alive=lambda writer: False)) as b:
        b.collect()
        assert consume(b.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        clock.now += SIZE_S
        assert consume(b.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
    a.close()


@pytest.mark.parametrize("remembered", [True, False])
def test_recovery_goes_on_behind_a_hole(remembered: bool) -> None:
    """Writes of a segment overtake each other: what follows one that failed may have been promised. A lost chunk takes
    the records in it and none behind, also where the mount remembers a size of nothing."""
    clock, server, index = Clock(), Server(chunk_bytes=16_384), SharedIndex()
    mount = HostileMount(server, clock)
    entries = [block("a", number, length=9_000) for number in range(6)]
    a = open_on(mount, index)
    durable(a, list(entries))
    assert not any(path.endswith(".idx") for path in server.files), "the scan of an unsealed segment is what is tried"
    mount.moods.gone = True
    server.held.clear()
    again = HostileMount(server, clock)
    touched = set()
    for path, data in server.files.items():
        if not path.endswith(".seg"):
            continue
        if remembered:
            again._sizes[path] = (clock() + SIZE_S, 0)
        if 1 in data.chunks:
            del data.chunks[1]
            touched.add(path)
    hurt = {
        row.key
        for row in index.scan(soon())
        if row.group in touched and row.place < 2 * 16_384 and row.place + record_bytes(row.length) > 16_384
    }
    assert 0 < len(hurt) < len(entries)
    with closing(open_on(again, SharedIndex(), alive=lambda writer: False)) as b:
        b.collect()
        results = consume(b.get_many(keys(entries), soon()))
    for entry, result in zip(entries, results, strict=True):
        assert result == (Miss.ABSENT if entry.info.key in hurt else entry.payload)
    a.close()


@pytest.mark.parametrize(
    ("mood", "miss"),
    [("read_errors", Miss.SERVER), ("read_timeouts", Miss.TIMEOUT), ("read_busy", Miss.BUSY)],
)
def test_a_moment_without_an_answer_costs_no_row(mood: str, miss: Miss) -> None:
    """L17: counted by cause; what the disk could not say now it says later."""
    mount, index = HostileMount(Server(), Clock()), SharedIndex()
    entries = prefix("a", 3)
    with closing(open_on(mount, index)) as store:
        durable(store, list(entries))
        setattr(mount.moods, mood, 1.0)
        assert consume(store.get_many(keys(entries), soon())) == [miss] * len(entries)
        assert store.stats().misses[miss] == len(entries)
        setattr(mount.moods, mood, 0.0)
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]


def test_a_vanished_mount_is_a_miss_and_comes_back_without_a_restart() -> None:
    """L17: everything is a miss at once, writes fail and are counted; then all is as before."""
    mount, index = HostileMount(Server(), Clock()), SharedIndex()
    old, lost, new = prefix("a", 3), prefix("b", 3), prefix("c", 3)
    with closing(open_on(mount, index)) as store:
        durable(store, list(old))
        mount.moods.gone = True
        assert consume(store.get_many(keys(old), soon())) == [Miss.NOT_CONNECTED] * len(old)
        ticket = store.put_many(lost)
        assert store.flush(20.0)
        assert not any(ticket.durable.result(timeout=60.0))
        assert sum(store.stats().failed_writes.values()) == len(lost)
        mount.moods.gone = False
        assert consume(store.get_many(keys(old), soon())) == [entry.payload for entry in old]
        assert not any(store.lookup(keys(lost), soon()))
        durable(store, list(new))
        durable(store, list(lost))
        assert consume(store.get_many(keys(new + lost), soon())) == [entry.payload for entry in new + lost]


@pytest.mark.parametrize("seed", range(6))
def test_in_any_mood_nothing_durable_is_lost_and_nothing_wrong_is_read(seed: int) -> None:
    """Two hosts, all faults at once, writes that land after they were given up; at the end one host dies and the index
    is lost and rebuilt from the bytes."""
    chooser = random.Random(seed)
    clock, server, index = Clock(), Server(chunk_bytes=8_192), SharedIndex()
    mounts = [HostileMount(server, clock) for _ in range(2)]
    stores = [open_on(mount, index, alive=lambda writer: False) for mount in mounts]
    kept: list[PutEntry] = []
    causes: Counter[Miss] = Counter()
    for turn in range(25):
        for mount in mounts:
            mount.moods.random = chooser
            for mood in ("read_errors", "read_timeouts", "read_busy", "write_errors", "write_timeouts", "sync_errors"):
                setattr(mount.moods, mood, chooser.choice([0.0, 0.0, 0.1]))
            mount.moods.name_timeouts = chooser.choice([0.0, 0.0, 0.05])
            mount.moods.gone = chooser.random() < 0.05
            while mount.late and chooser.random() < 0.7:
                mount.late.pop(chooser.randrange(len(mount.late)))()
        clock.now += chooser.choice([0.0, 1.0, 6.0])
        writer, reader = chooser.sample(stores, 2)
        entries = prefix(f"{seed}-{turn}", chooser.randrange(1, 6), retention=RetentionClass.CHAT)
        ticket = writer.put_many(entries)
        assert writer.flush(20.0)
        good = ticket.durable.result(timeout=60.0)
        kept += [entry for entry, stored in zip(entries, good, strict=True) if stored]
        asked = chooser.sample(kept, min(len(kept), 8))
        for entry, result in zip(asked, reader.get_many(keys(asked), soon()), strict=True):
            if isinstance(result, Loaded):
                assert bytes(result.payload) == entry.payload
                result.release()
            else:
                causes[result] += 1
                assert result not in (Miss.DIGEST, Miss.HEADER, Miss.HOLE, Miss.SHORT), "acknowledged bytes are there"
    for mount in mounts:
        mount.moods = type(mount.moods)()
        while mount.late:
            mount.late.pop()()
    clock.now += SIZE_S
    assert consume(stores[1].get_many(keys(kept), soon())) == [entry.payload for entry in kept]
    mounts[0].moods.gone = True  # the other host dies with whatever it had open
    stores[1].close()
    server.held.clear()
    with closing(open_on(HostileMount(server, clock), SharedIndex(), alive=lambda writer: False)) as fresh:
        fresh.collect()
        assert _found(fresh, kept) == len(kept)
    stores[0].close()
    assert len(kept) > 20, "the moods left something to check"


def test_a_writer_taken_for_dead_promises_nothing_more_and_spoils_nothing() -> None:
    """ "A stopped process is alive": a host that was cut off comes back and goes on writing where another has sealed.
    What it was promised before stays; what it writes now is refused; nothing that the other sealed is touched."""
    clock, server, index = Clock(), Server(), SharedIndex()
    here, there = HostileMount(server, clock), HostileMount(server, clock)
    before, after = prefix("a", 3), prefix("b", 3)
    with closing(open_on(here, index)) as a:
        durable(a, list(before))
        server.held.clear()  # the registry lost sight of A
        with closing(open_on(there, index, alive=lambda writer: False)) as b:
            b.collect()
            sealed = {path: data.length for path, data in server.files.items() if path.endswith((".seg", ".idx"))}
            assert any(path.endswith(".idx") for path in sealed)
            ticket = a.put_many(after)
            assert a.flush(20.0)
            assert not any(ticket.durable.result(timeout=60.0))
            assert a.stats().failed_writes["ESTALE"] == len(after)
            assert a.collect().refused
            a.close()
            assert {path for path in sealed if path.endswith(".idx")} <= set(server.files)
            assert consume(b.get_many(keys(before), soon())) == [entry.payload for entry in before]
            durable(b, list(after))
    with closing(open_on(there, SharedIndex())) as c:
        c.collect()
        assert _found(c, before + after) == len(before + after)


def test_a_mount_that_vanishes_under_a_refill_does_not_leave_an_empty_index() -> None:
    """A refill that could read nothing is no refill: it is tried again when the mount is back."""
    mount, entries = HostileMount(Server(), Clock()), prefix("a", 4)
    with closing(open_on(mount, SharedIndex())) as store:
        durable(store, list(entries))
    lost = SharedIndex()
    mount.broken = {path: errno.ENOTCONN for path in mount.server.files if path.startswith("v1/")}
    with closing(open_on(mount, lost)) as store:
        assert lost.needs_rebuild(soon())
        mount.broken = {}
        assert _found(store, entries) == len(entries)
        assert not lost.needs_rebuild(soon())


def test_one_segment_that_cannot_be_read_keeps_no_other_from_adoption() -> None:
    server, clock = Server(), Clock()
    mount = HostileMount(server, clock)
    entries = [block("a", number, length=9_000) for number in range(4)]
    others = [block("b", number, length=9_000, retention=RetentionClass.AGENT) for number in range(4)]
    a = open_on(mount, SharedIndex())
    durable(a, [*entries, *others])
    mount.moods.gone = True
    server.held.clear()
    first = min(path for path in server.files if path.endswith(".seg"))
    again = HostileMount(server, clock)
    again.broken[first] = errno.EIO
    with closing(open_on(again, SharedIndex(), alive=lambda writer: False)) as b:
        b.collect()
        results = consume(b.get_many(keys(entries + others), soon()))
        assert Counter(isinstance(result, bytes) for result in results) == {True: 4, False: 4}
        again.broken.clear()
        b.collect()
        assert _found(b, entries + others) == 8
    a.close()


class _Late(SharedIndex):
    """Something happens just before somebody asks for its groups."""

    then: Callable[[], None] | None = None

    def groups(self, deadline: float) -> Sequence[str]:
        then, self.then = self.then, None
        if then is not None:
            then()
        return super().groups(deadline)


@pytest.mark.parametrize("lag", [True, False])
def test_a_scrub_takes_no_row_of_a_segment_that_is_made_meanwhile(lag: bool) -> None:
    """Nothing durable is lost: the files are listed at one moment and the index is asked at another; and the mount of
    another host may deny for 5 s what it asked for before it was there."""
    clock, server, index = Clock(), Server(), _Late()
    here, there = HostileMount(server, clock), HostileMount(server, clock)
    there.names_lag = lag
    before, meanwhile = prefix("a", 3), prefix("b", 3, retention=RetentionClass.AGENT)
    with closing(open_on(here, index)) as a, closing(open_on(there, index)) as b:
        durable(a, list(before))
        if lag:
            durable(a, list(meanwhile))
        else:
            clock.now += NEGATIVE_S
            index.then = lambda: durable(a, list(meanwhile))
        report = b.verify()
        assert (report.dangling, report.bad) == (0, ())
        assert list(a.lookup(keys(before + meanwhile), soon())) == [True] * 8


def test_a_segment_that_cannot_be_renamed_stays_whole() -> None:
    """An eviction that breaks off half-way leaves the segment, its sidecar and its rows as they were."""
    mount, index = HostileMount(Server(), Clock()), SharedIndex()
    entries = prefix("a", 3)
    with closing(open_on(mount, index)) as store:
        durable(store, list(entries))
    with closing(open_on(mount, index)) as store:
        files = set(mount.server.files)
        row = index.get_many(keys(entries), soon())[0]
        assert row is not None
        bucket = row.group.removeprefix("v1/").rpartition("/")[0]
        mount.fail_renames = True
        with pytest.raises(StoreError):
            store.drop_bucket(bucket)
        mount.fail_renames = False
        store.collect()
        assert {path for path in files if path.startswith("v1/")} <= set(mount.server.files)
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        assert store.drop_bucket(bucket).blocks == 3


def _found(store: Store, entries: list[PutEntry]) -> int:
    """How many come back right, once the refill of a lost index is through."""
    until = time.monotonic() + 60
    while True:
        results = consume(store.get_many(keys(entries), soon()))
        found = sum(result == entry.payload for entry, result in zip(entries, results, strict=True))
        if found == len(entries) or time.monotonic() >= until:
            return found
