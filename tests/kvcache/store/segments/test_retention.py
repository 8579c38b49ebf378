"""Retention carried out by the real engine: expiry, refresh, quotas, pressure, with a clock that the test sets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.kvcache.cache_events import BucketDropped, CacheChange, Removed
from headrace.kvcache.entries import GetResult, Miss, RetentionClass
from headrace.kvcache.index.base import Index, IndexRow
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.store.base import PutEntry
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.retention.classes import DAY, DEFAULT, HOUR
from headrace.kvcache.store.retention.pressure import Plan
from headrace.kvcache.store.segments.disk_use import DiskMeter
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.open_segment import OpenSegment
from headrace.kvcache.store.segments.sealing import Sealer
from headrace.kvcache.store.segments.settings import SegmentSettings
from headrace.kvcache.store.segments.uses import PrefixUse, UseFiles, decode_uses, encode_uses
from tests.kvcache.store.entries import OTHER_TENANT, TENANT, FakeWall, consume, keys, prefix, soon

AGENT, CHAT = RetentionClass.AGENT, RetentionClass.CHAT
SETTINGS = SegmentSettings(
    segment_bytes=128 * 1024,
    queue_bytes=16 << 20,
    read_buffer_bytes=4 << 20,
    read_threads=2,
    sync_idle_s=0.005,
    sweep_s=3600,
)
RECORD = 12_288
"""Bytes on disk of a block of 5,000."""
Open = Callable[..., SegmentStore]


class SharedIndex(DictIndex):
    """An index whose server has a clock."""

    def __init__(self, clock: FakeWall) -> None:
        super().__init__()
        self._clock = clock

    def wall(self, deadline: float) -> float | None:
        return self._clock()


@pytest.fixture
def wall() -> FakeWall:
    return FakeWall(1_800_000_000.0)


@pytest.fixture
def events() -> list[CacheChange]:
    return []


@pytest.fixture
def open_store(tmp_path: Path, wall: FakeWall, events: list[CacheChange]) -> Iterator[Open]:
    opened: list[SegmentStore] = []

    def build(
        *,
        boot: str = "1",
        index: Index | None = None,
        capacity: int = 0,
        tenant: int = 0,
        tick_s: float = 3600,
    ) -> SegmentStore:
        store = SegmentStore(
            PosixFileLayer(tmp_path / "store"),
            index or DictIndex(),
            replace(SETTINGS, node="n", boot=boot, capacity_bytes=capacity, tenant_bytes=tenant, tick_s=tick_s),
            events=events.append,
            wall=wall,
        )
        opened.append(store)
        return store

    yield build
    for store in opened:
        store.close()


def put(store: SegmentStore, entries: list[PutEntry]) -> tuple[bool, ...]:
    """Accepted, once what was accepted is durable."""
    ticket = store.put_many(entries)
    assert store.flush(20)
    return ticket.accepted


def pass_time(store: SegmentStore, wall: FakeWall, seconds: float) -> None:
    """The sweeper loses one pass to the jump, and trusts the new time from then on."""
    wall.now += seconds
    assert "jumped" in store.collect().refused


def disk_bytes(root: Path) -> int:
    """Of all segments, those on their way out included; what vanishes meanwhile takes nothing."""
    total = 0
    for path in (*root.rglob("*.seg"), *root.rglob("*.gone")):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def buckets(root: Path) -> set[str]:
    return {str(path.relative_to(root / "v1")) for path in (root / "v1").glob("*/*/*") if path.is_dir()}


def test_expiry_unlinks_segments_and_removes_buckets(
    open_store: Open, wall: FakeWall, events: list[CacheChange], tmp_path: Path
) -> None:
    store = open_store()
    short, long = prefix("agent", 4, retention=AGENT), prefix("chat", 4, retention=CHAT)
    put(store, short + long)
    names = {entry.bucket for entry in store.find(keys(short), soon()) if entry}
    assert len(buckets(tmp_path / "store")) == 2
    pass_time(store, wall, 3 * DAY + HOUR)
    assert set(consume(store.get_many(keys(short), soon()))) == {Miss.EXPIRED}, "before any sweep"
    assert store.collect().expired_buckets == 1
    assert len(buckets(tmp_path / "store")) == 1
    assert [event.bucket for event in events if isinstance(event, BucketDropped)] == list(names)
    assert consume(store.get_many(keys(long), soon())) == [entry.payload for entry in long]
    pass_time(store, wall, 4 * DAY + 4 * HOUR)
    store.collect()
    assert buckets(tmp_path / "store") == set()
    assert disk_bytes(tmp_path / "store") == 0
    assert store.stats().expired_entries == 10


def test_nothing_is_swept_while_the_clock_cannot_be_trusted(open_store: Open, wall: FakeWall, tmp_path: Path) -> None:
    shared = FakeWall(wall.now)
    store = open_store(index=SharedIndex(shared))
    put(store, prefix("a", 3))
    wall.now += 30 * DAY
    for _ in range(3):
        assert "off the index server" in store.collect().refused
    assert len(buckets(tmp_path / "store")) == 1
    wall.now -= 30 * DAY
    assert "jumped" in store.collect().refused
    assert store.collect().refused == ""
    assert all(isinstance(found, bytes) for found in consume(store.get_many(keys(prefix("a", 3)), soon())))


def test_a_hit_under_half_of_life_refreshes_the_whole_prefix_with_its_snapshot(
    open_store: Open, wall: FakeWall
) -> None:
    store = open_store()
    used = prefix("a", 6)
    put(store, used)
    before = [entry.expires_at for entry in store.find(keys(used), soon()) if entry]
    wall.now += 3.4 * DAY
    store.touch(keys(used), CHAT, TENANT)
    assert store.flush(20)
    assert store.stats().refreshed_bytes == 0, "more than half of its life is left"
    wall.now += 0.3 * DAY
    for _ in range(5):
        store.touch(keys(used), CHAT, TENANT)
    assert store.flush(20)
    assert store.stats().refreshed_bytes == sum(entry.info.length for entry in used), "once, though asked five times"
    after = store.find(keys(used), soon())
    assert {entry.expires_at for entry in after if entry} == {float(DEFAULT.bucket(CHAT, wall.now))}
    assert len({entry.bucket for entry in after if entry}) == 1
    wall.now = before[0] + HOUR
    store.collect()
    store.collect()
    assert consume(store.get_many(keys(used), soon())) == [entry.payload for entry in used]


def test_only_what_is_old_is_refreshed(open_store: Open, wall: FakeWall) -> None:
    store = open_store()
    chat = prefix("a", 6, snapshot=0)
    put(store, chat[:3])
    wall.now += 3.6 * DAY
    put(store, chat[3:])
    store.touch(keys(chat), CHAT, TENANT)
    assert store.flush(20)
    assert store.stats().refreshed_bytes == 3 * 5_000
    assert all(entry and entry.expires_at - wall.now >= 3.5 * DAY for entry in store.find(keys(chat), soon()))


def test_a_longer_class_takes_over_and_a_shorter_does_not_shorten(open_store: Open, wall: FakeWall) -> None:
    store = open_store()
    used = prefix("a", 3, retention=AGENT)
    put(store, used)
    store.touch(keys(used), CHAT, TENANT)
    assert store.flush(20)
    found = store.find(keys(used), soon())
    assert {entry.retention for entry in found if entry} == {CHAT}
    assert {entry.expires_at for entry in found if entry} == {float(DEFAULT.bucket(CHAT, wall.now))}
    store.touch(keys(used), AGENT, TENANT)
    assert store.flush(20)
    assert store.find(keys(used), soon()) == found


def test_a_prefix_computed_again_although_it_is_there_counts_as_used(open_store: Open, wall: FakeWall) -> None:
    store = open_store()
    used = prefix("a", 3)
    put(store, used)
    wall.now += 4 * DAY
    assert put(store, used) == (False,) * 4
    assert store.flush(20)
    assert all(entry and entry.expires_at - wall.now >= 7 * DAY for entry in store.find(keys(used), soon()))


def test_pinned_entries_outlive_everything(open_store: Open, wall: FakeWall) -> None:
    store = open_store(capacity=100 * RECORD)
    kept = prefix("pinned", 10)
    put(store, kept)
    assert store.pin(keys(kept)) == 11
    for number in range(20):
        put(store, prefix(f"flood {number}", 10))
        store.collect()
    pass_time(store, wall, 400 * DAY)
    store.collect()
    assert consume(store.get_many(keys(kept), soon())) == [entry.payload for entry in kept]


def test_a_pin_outlives_a_refresh_that_read_before_it(open_store: Open, wall: FakeWall) -> None:
    """The refresh has the old copy in hand when the pin becomes durable; its own copy comes later and counts less."""
    store = open_store()
    put(store, prefix("a", 3))
    pass_time(store, wall, 5 * DAY)
    rewriter = store._parts.rewriter
    read = rewriter._read
    pinned: list[int] = []

    def read_and_pin(rows: Sequence[IndexRow], deadline: float) -> list[GetResult]:
        results = read(rows, deadline)
        if not pinned:
            pinned.append(0)
            pinned.append(store.pin(keys(prefix("a", 3))))
        return results

    rewriter._read = read_and_pin  # type: ignore[method-assign]
    store.touch(keys(prefix("a", 3)), CHAT, TENANT)
    assert store.flush(20)
    assert pinned == [0, 4]
    found = store.find(keys(prefix("a", 3)), soon())
    assert [entry.retention for entry in found if entry is not None] == [RetentionClass.PINNED] * 4
    assert store.stats().failed_writes == {"outlived": 4}


def test_what_cannot_be_appended_again_keeps_its_segment(
    open_store: Open, events: list[CacheChange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L4: a segment is emptied before it goes. Without room for what the plan keeps it stays for another pass; only
    where no segment at all could be emptied the least of them goes as it is, or a full store would stay full."""
    store = open_store()
    used = prefix("a", 6)
    put(store, used)
    parts = store._parts
    (path,) = {row.group for row in parts.index.get_many(keys(used), soon()) if row is not None}
    parts.writer.rotate()
    assert parts.own.wait_closed([path], 20.0)
    everything = Plan(0, {}, (), (path,), 0)
    monkeypatch.setattr(parts.uses, "plan", lambda *_: everything)

    def read() -> list[bytes | Miss]:
        return list(consume(store.get_many(keys(used), soon())))

    parts.relief._look(parts.quotas.measure())
    with monkeypatch.context() as full:
        full.setattr(parts.quotas, "_charge", lambda path, least: None)
        assert not parts.relief._empty(path, everything)
        assert read() == [entry.payload for entry in used]
    assert parts.relief.relieve().segments == 1
    assert read() == [entry.payload for entry in used]
    (moved,) = {row.group for row in parts.index.get_many(keys(used), soon()) if row is not None}
    assert moved != path
    assert not any(isinstance(event, Removed) for event in events)
    parts.writer.rotate()
    assert parts.own.wait_closed([moved], 20.0)
    everything = Plan(0, {}, (), (moved,), 0)
    monkeypatch.setattr(parts.quotas, "_charge", lambda path, least: None)
    assert parts.relief.relieve().freed_bytes > 0
    assert set(read()) == {Miss.ABSENT}
    assert {key for event in events if isinstance(event, Removed) for key in event.keys} == set(keys(used))


def test_pressure_waits_for_a_slow_seal(
    open_store: Open,
    wall: FakeWall,
    events: list[CacheChange],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L4: on a slow disk segments are unsealed, and so cannot go, while the store is full: what is used stays."""
    seal = Sealer._seal

    def slowly(sealer: Sealer, segment: OpenSegment) -> None:
        time.sleep(0.1)
        seal(sealer, segment)

    monkeypatch.setattr(Sealer, "_seal", slowly)
    test_pressure_keeps_the_quota_and_what_is_used(open_store, wall, events, tmp_path, "dict")


@pytest.mark.parametrize("kind", ["dict", "sqlite"])
def test_pressure_keeps_the_quota_and_what_is_used(
    open_store: Open, wall: FakeWall, events: list[CacheChange], tmp_path: Path, kind: str
) -> None:
    quota = 300 * RECORD
    store = open_store(index=DictIndex() if kind == "dict" else SqliteIndex(tmp_path / "i.sqlite"), capacity=quota)
    favourite = prefix("favourite", 12)
    put(store, favourite)
    chains = [prefix(f"chain {number}", 10, snapshot=0) for number in range(80)]
    evicted = 0
    for chain in chains:
        wall.now += 5
        store.touch(keys(favourite), CHAT, TENANT)
        put(store, chain)
        evicted += store.collect().evicted_segments
        assert disk_bytes(tmp_path / "store") <= quota
    assert evicted > 20
    assert consume(store.get_many(keys(favourite), soon())) == [entry.payload for entry in favourite]
    found = [all(isinstance(each, bytes) for each in consume(store.get_many(keys(chain), soon()))) for chain in chains]
    assert found[-8:] == [True] * 8, "the newest stay"
    assert not any(found[:40])
    gone = {key for event in events if isinstance(event, Removed) for key in event.keys}
    missing = {key for chain in chains for key in keys(chain) if not store.lookup([key], soon())[0]}
    assert missing <= gone, "whatever went was told"
    stats = store.stats()
    assert stats.evicted_entries == len(missing)
    assert stats.refreshed_bytes <= 0.3 * (stats.written_bytes - stats.refreshed_bytes) + 0.03 * quota


def test_the_sweeper_relieves_pressure_by_itself(open_store: Open, wall: FakeWall, tmp_path: Path) -> None:
    store = open_store(capacity=200 * RECORD, tick_s=0.01)
    for number in range(200):
        wall.now += 1
        put(store, prefix(f"{number}", 10, snapshot=0))
        assert disk_bytes(tmp_path / "store") <= 200 * RECORD
    # While the sweeper has not had its turn, a full store refuses; after it, what is new fits again.
    limit = time.monotonic() + 60
    last = prefix("last", 10, snapshot=0)
    while not all(store.lookup(keys(last), soon())):
        assert time.monotonic() < limit, store.stats()
        put(store, last)
        time.sleep(0.01)
    assert store.stats().evicted_entries > 0


def test_one_tenant_over_its_quota_costs_no_other_tenant(open_store: Open, wall: FakeWall) -> None:
    """L25: within its own quota a tenant loses nothing to another's appetite."""
    store = open_store(capacity=1_000 * RECORD, tenant=100 * RECORD)
    quiet = prefix("quiet", 60, tenant=OTHER_TENANT)
    put(store, quiet)
    for number in range(60):
        wall.now += 5
        put(store, prefix(f"greedy {number}", 10, snapshot=0))
        store.collect()
        assert store.table.tenant_bytes(TENANT) <= 100 * RECORD
    assert store.table.tenant_bytes(TENANT) >= 70 * RECORD
    assert consume(store.get_many(keys(quiet), soon())) == [entry.payload for entry in quiet]
    newest = prefix("greedy 59", 10, snapshot=0)
    assert all(store.lookup(keys(newest), soon()))
    assert not any(store.lookup(keys(prefix("greedy 0", 10, snapshot=0)), soon()))


def test_beyond_a_quota_writes_are_refused_and_counted(open_store: Open) -> None:
    store = open_store(capacity=1_000 * RECORD, tenant=10 * RECORD)
    accepted = put(store, prefix("a", 9, snapshot=0))
    assert all(accepted)
    assert put(store, prefix("b", 9, snapshot=0)) == (True,) + (False,) * 8, "prefix before suffix"
    assert store.stats().refused_quota == 1
    assert put(store, prefix("c", 2, tenant=OTHER_TENANT, snapshot=0)) == (True, True)


def test_a_full_disk_quota_refuses_instead_of_overflowing(open_store: Open, tmp_path: Path) -> None:
    quota = 100 * RECORD
    store = open_store(capacity=quota)
    for number in range(40):
        put(store, prefix(f"{number}", 10, snapshot=0))  # nobody sweeps
        assert disk_bytes(tmp_path / "store") <= quota
    assert store.stats().refused_quota > 0
    assert store.collect().freed_bytes > 0
    assert put(store, prefix("later", 5)) == (True,) * 6


def test_a_reader_during_eviction_gets_right_bytes_or_a_miss(open_store: Open, wall: FakeWall) -> None:
    """L4."""
    store = open_store(capacity=150 * RECORD)
    chains = [prefix(f"chain {number}", 10, snapshot=0) for number in range(40)]
    right = {entry.info.key: entry.payload for chain in chains for entry in chain}
    stop = threading.Event()
    seen: list[int] = []
    wrong: list[bytes] = []

    def read() -> None:
        while not stop.is_set():
            for chain in chains:
                for key, found in zip(keys(chain), consume(store.get_many(keys(chain), soon())), strict=True):
                    if isinstance(found, bytes):
                        seen.append(1)
                        if found != right[key]:
                            wrong.append(key)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        evicted = 0
        for _ in range(2):
            for chain in chains:
                wall.now += 5
                put(store, chain)
                evicted += store.collect().evicted_segments
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert evicted > 0
    assert seen
    assert wrong == []


def test_what_another_process_uses_is_not_evicted(open_store: Open, wall: FakeWall, tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "i.sqlite")
    sweeping = open_store(boot="1", index=index, capacity=200 * RECORD)
    assert sweeping.collect().refused == ""
    other = open_store(boot="2", index=SqliteIndex(tmp_path / "i.sqlite"), capacity=200 * RECORD)
    assert "another process" in other.collect().refused
    favourite = prefix("favourite", 12)
    put(other, favourite)
    sender = UseFiles(PosixFileLayer(tmp_path / "store"), "n-2")
    for number in range(50):
        wall.now += 5
        other.touch(keys(favourite), CHAT, TENANT)
        assert other.flush(20)
        # What its tick does every five seconds.
        sender.send([PrefixUse(wall.now, True, tuple((e.info.key, e.info.tokens) for e in favourite))])
        put(sweeping, prefix(f"{number}", 10, snapshot=0))
        assert sweeping.collect().refused == ""
    assert sweeping.stats().evicted_entries > 0
    assert consume(other.get_many(keys(favourite), soon())) == [entry.payload for entry in favourite]
    assert list((tmp_path / "store" / "uses").iterdir()) == []


def test_uses_travel_whole_or_not_at_all(tmp_path: Path) -> None:
    uses = tuple(
        PrefixUse(1.5 + n, bool(n % 2), ((bytes([n]) * 32, 128), (bytes([n + 1]) * 32, 256))) for n in range(3)
    )
    data = encode_uses(uses)
    assert decode_uses(data) == uses
    for size in range(len(data)):
        assert decode_uses(data[:size]) is None
    files = PosixFileLayer(tmp_path)
    sender = UseFiles(files, "n-1")
    for _ in range(30):
        sender.send(uses)
    assert len(files.list("uses")) <= 8, "L12: a sweeper that is away costs a few files"
    assert list(UseFiles(files, "n-2").receive())[: len(uses)] == list(uses)
    assert files.list("uses") == []


def test_the_meter_counts_what_the_disk_holds(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    for number in range(5):
        put(store, prefix(f"{number}", 10))
    store.close()
    root = tmp_path / "store"
    use = DiskMeter(PosixFileLayer(root)).measure()
    files = [path for path in (root / "v1").rglob("*") if path.is_file()]
    assert use.nbytes == sum(path.stat().st_size for path in files)
    assert {segment.name.path for segment in use.segments if segment.sealed} == {
        str(path.relative_to(root).with_suffix(".seg")) for path in files if path.suffix == ".idx"
    }
