"""What the segment engine does beyond the contract of stores: groups, sealing, fallbacks, damage, adoption."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.kvcache.cache_events import CacheChange, Removed, Stored
from headrace.kvcache.entries import Loaded, Miss, RetentionClass
from headrace.kvcache.index.base import IndexRow, IndexUnavailable
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.names import LOCKS, SegmentName
from headrace.kvcache.store.segments.record import record_bytes
from headrace.kvcache.store.segments.recovery import find_segments, read_sidecar
from headrace.kvcache.store.segments.settings import SegmentSettings
from tests.kvcache.store.contract import closing, durable
from tests.kvcache.store.entries import (
    NAMESPACE,
    OTHER_NAMESPACE,
    OTHER_TENANT,
    TENANT,
    FakeWall,
    Payload,
    block,
    consume,
    keys,
    payload_of,
    prefix,
    soon,
)
from tests.kvcache.store.segments.fake_files import BufferedLayer

SEGMENT = 256 * 1024


def small(**changes: object) -> SegmentSettings:
    values: dict[str, object] = {
        "segment_bytes": SEGMENT,
        "queue_bytes": 16 << 20,
        "read_buffer_bytes": 4 << 20,
        "read_threads": 2,
        "sync_idle_s": 0.005,
        "sweep_s": 1e9,
    }
    return SegmentSettings(**(values | changes))  # type: ignore[arg-type]


class FakeOutage(DictIndex):
    """An index that stops answering."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False

    def get_many(self, keys: object, deadline: float) -> list[IndexRow | None]:  # type: ignore[override]
        self._ask()
        return list(super().get_many(keys, deadline))  # type: ignore[arg-type]

    def put_many(self, rows: object, deadline: float) -> None:  # type: ignore[override]
        self._ask()
        super().put_many(rows, deadline)  # type: ignore[arg-type]

    def _ask(self) -> None:
        if self.away:
            raise IndexUnavailable("away")


def abandon(store: SegmentStore) -> None:
    """What a kill leaves in files: no seal, no sidecar; the lock is free. (The threads of the dead store idle on.)"""
    store._parts.sweeper.close()
    store._parts.lock._file.close()


@pytest.fixture
def files(tmp_path: Path) -> PosixFileLayer:
    return PosixFileLayer(tmp_path / "store")


def segments(files: PosixFileLayer) -> list[tuple[SegmentName, bool]]:
    return [(found.name, found.sidecar) for found in find_segments(files)]


def test_segments_are_sealed_when_full_and_at_the_end(files: PosixFileLayer) -> None:
    entries = prefix("a", 40, length=30_000, snapshot=0)
    with closing(SegmentStore(files, DictIndex(), small())) as store:
        durable(store, entries)
    found = segments(files)
    assert len(found) > 4
    assert all(sealed for _, sealed in found)
    told: list[Key] = []
    for name, _ in found:
        assert os.path.getsize(files.root / name.path) <= SEGMENT
        headers = read_sidecar(files, name)
        assert headers
        told += [header.info.key for header in headers]
    assert sorted(told) == sorted(keys(entries)), "the prefix lies in order, each block once"
    assert list(files.list(LOCKS)) == [], "a settled writer leaves nothing to look at"


def test_a_record_larger_than_a_segment_has_one_of_its_own(files: PosixFileLayer) -> None:
    entries = [block("a", 0), block("large", 0, length=3 * SEGMENT), block("a", 1)]
    with closing(SegmentStore(files, DictIndex(), small())) as store:
        durable(store, entries)
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]


def test_namespaces_and_classes_lie_apart(files: PosixFileLayer) -> None:
    entries = [
        block("a", 0),
        block("b", 0, retention=RetentionClass.AGENT),
        block("c", 0, namespace=OTHER_NAMESPACE),
        block("d", 0, tenant=OTHER_TENANT),
    ]
    with closing(SegmentStore(files, DictIndex(), small())) as store:
        durable(store, entries)
        assert len({name.bucket for name, _ in segments(files)}) == 3


def test_without_direct_io_it_says_so_and_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = BufferedLayer(tmp_path)
    entries = prefix("a", 5)
    with caplog.at_level(logging.WARNING), closing(SegmentStore(files, DictIndex(), small())) as store:
        durable(store, entries)
        assert not store.stats().direct_io
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
    assert "O_DIRECT" in caplog.text
    with closing(SegmentStore(files, DictIndex(), small())) as store:
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]


def test_a_boot_id_serves_once_at_a_time(files: PosixFileLayer) -> None:
    """L14: two writers under one name would write into each other's files."""
    settings = small(boot="abc")
    with closing(SegmentStore(files, DictIndex(), settings)), pytest.raises(StoreError, match="runs already"):
        SegmentStore(files, DictIndex(), settings)


def flip(files: PosixFileLayer, path: str, offset: int) -> None:
    with (files.root / path).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_a_bad_record_is_found_dropped_and_written_again(files: PosixFileLayer) -> None:
    """L3: never returned, quarantined once, said to everybody, and replaced when the entry is offered again."""
    events: list[CacheChange] = []
    index = DictIndex()
    entries = prefix("a", 3, snapshot=0)
    with closing(SegmentStore(files, index, small(), events=events.append)) as store:
        durable(store, entries)
        row = index.get_many([entries[1].info.key], soon())[0]
        assert row is not None
        flip(files, row.group, row.place + 4096 + 77)
        got = consume(store.get_many(keys(entries), soon()))
        assert got == [entries[0].payload, Miss.DIGEST, entries[2].payload]
        assert [event.keys for event in events if isinstance(event, Removed)] == [(entries[1].info.key,)]
        assert consume(store.get_many([entries[1].info.key], soon())) == [Miss.ABSENT]
        assert store.stats().quarantined == 1
        durable(store, [entries[1]])
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]


def test_a_scrub_finds_what_no_reader_met(files: PosixFileLayer) -> None:
    index = DictIndex()
    entries = prefix("a", 30, length=9_000, snapshot=0)
    with closing(SegmentStore(files, index, small())) as store:
        durable(store, entries)
        rows = [row for row in index.get_many(keys(entries), soon()) if row is not None]
        flip(files, rows[3].group, rows[3].place + 5_000)
        flip(files, rows[9].group, rows[9].place + 30)
        index.remove_many([rows[20]], soon())
        report = store.verify()
        assert sorted(key for key, _ in report.bad) == sorted([rows[3].key, rows[9].key])
        assert (report.checked, report.missing_in_index, report.dangling) == (30, 1, 2)
        assert list(store.lookup([rows[3].key, rows[9].key, rows[4].key], soon())) == [False, False, True]


def test_a_scrub_forgives_the_old_copy_of_what_was_written_again(files: PosixFileLayer) -> None:
    """A bad record of a sealed segment is told until its entry is there again, and counted as quarantined once."""
    index = DictIndex()
    entries = prefix("a", 6, length=9_000, snapshot=0)
    with closing(SegmentStore(files, index, small())) as store:
        durable(store, entries)
    with closing(SegmentStore(files, index, small())) as store:
        rows = [row for row in index.get_many(keys(entries), soon()) if row is not None]
        for row in rows[1:4]:
            flip(files, row.group, row.place + 5_000)
        flip(files, rows[4].group, rows[4].place + 30)
        spoilt = {row.key for row in rows[1:5]}
        assert {key for key, _ in store.verify().bad} == spoilt
        assert {key for key, _ in store.verify().bad} == spoilt, "still lost"
        assert store.stats().quarantined == 3
        durable(store, entries[1:5])
        assert store.verify().bad == ()
        moved = index.get_many([rows[1].key], soon())[0]
        assert moved is not None
        flip(files, moved.group, moved.place + 5_000)
        assert store.verify().bad == ((rows[1].key, Miss.DIGEST),)


def test_a_small_store_tells_what_others_wrote_at_once(files: PosixFileLayer, tmp_path: Path) -> None:
    """Operators look a second after a request, not after the next sweep; an index that is away changes nothing."""
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(path)
    with (
        closing(SegmentStore(files, index, small())) as mine,
        closing(SegmentStore(PosixFileLayer(files.root), SqliteIndex(path), small())) as theirs,
    ):
        durable(theirs, prefix("a", 5, snapshot=0))
        stats = mine.stats()
        assert (stats.blocks, stats.segments, stats.written_bytes) == (5, 1, 0)
        assert stats.payload_bytes == theirs.stats().payload_bytes
        assert mine.identity() == theirs.identity() != ""
        theirs.drop_namespace(NAMESPACE)
        assert mine.stats().blocks == 0


def test_an_index_outage_is_a_miss_and_a_refusal(files: PosixFileLayer) -> None:
    """L17: decided once, counted, and over as soon as the index is back."""
    index = FakeOutage()
    entries = prefix("a", 3)
    with closing(SegmentStore(files, index, small())) as store:
        durable(store, entries)
        index.away = True
        assert store.get_many(keys(entries), soon()) == [Miss.NOT_CONNECTED] * 4
        assert list(store.lookup(keys(entries), soon())) == [False] * 4
        assert store.put_many(prefix("b", 2)).accepted == (False,) * 3
        store.touch(keys(entries), RetentionClass.CHAT, TENANT)
        index.away = False
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        stats = store.stats()
        assert stats.misses[Miss.NOT_CONNECTED] == 8
        assert stats.failed_writes == {"index": 3}


def test_what_the_index_missed_is_told_later(files: PosixFileLayer) -> None:
    """Durable bytes that the index could not be told of do not count as stored, and are found all the same later."""
    index = FakeOutage()
    events: list[CacheChange] = []
    entries = prefix("a", 3)
    with closing(
        SegmentStore(files, index, small(sync_idle_s=5.0, sync_interval_s=30.0), events=events.append)
    ) as store:
        ticket = store.put_many(entries)
        assert all(ticket.accepted)
        index.away = True
        assert store.flush(20.0)
        assert ticket.durable.result() == (False,) * 4
        index.away = False
    with closing(SegmentStore(files, index, small(), events=events.append)) as store:
        store.collect()
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        assert sorted(key for e in events if isinstance(e, Stored) for key in e.keys) == sorted(keys(entries))


@pytest.fixture
def dead(files: PosixFileLayer) -> tuple[DictIndex, list[Key], list[Payload]]:
    """A store whose process died with open segments, and an index that has lost its last rows."""
    index = DictIndex()
    entries = prefix("a", 20, length=30_000, snapshot=0)
    store = SegmentStore(files, index, small(boot="dead"))
    durable(store, entries)
    abandon(store)
    rows = [row for row in index.get_many(keys(entries), soon()) if row is not None]
    index.remove_many(rows[-3:], soon())
    return index, keys(entries), [payload_of(entry.info.key, 30_000) for entry in entries]


def test_a_dead_writers_segments_are_adopted(
    files: PosixFileLayer, dead: tuple[DictIndex, list[Key], list[Payload]]
) -> None:
    """Sealed, cut to size, and in the index again; its lock file goes last."""
    index, all_keys, payloads = dead
    assert any(not sealed for _, sealed in segments(files))
    events: list[CacheChange] = []
    with closing(SegmentStore(files, index, small(), events=events.append)) as store:
        report = store.collect()
        assert not report.refused
        assert all(sealed for _, sealed in segments(files))
        assert all(name.writer.endswith("-dead") for name, _ in segments(files))
        assert consume(store.get_many(all_keys, soon())) == payloads
        assert sorted(key for e in events if isinstance(e, Stored) for key in e.keys) == sorted(all_keys[-3:])
        assert not any("dead" in name for name in files.list(LOCKS))
        assert store.collect().adopted_segments == 0
        assert store.verify().bad == ()


def test_a_writer_that_is_said_to_live_is_left_alone(
    files: PosixFileLayer, dead: tuple[DictIndex, list[Key], list[Payload]]
) -> None:
    """L8: by evidence. A lock that can be taken says nothing where a registry knows that its holder lives."""
    index, all_keys, payloads = dead
    with closing(SegmentStore(files, index, small(), liveness=lambda writer: writer.endswith("-dead"))) as store:
        assert store.collect().adopted_segments == 0
        assert any(not sealed for _, sealed in segments(files))
        assert consume(store.get_many(all_keys[:17], soon())) == payloads[:17]


def test_a_living_writer_is_never_adopted(files: PosixFileLayer) -> None:
    index = DictIndex()
    with closing(SegmentStore(files, index, small(boot="aa"))) as first:
        entries = prefix("a", 3)
        durable(first, entries)
        with closing(SegmentStore(files, index, small(boot="bb"))) as second:
            reports = [store.collect() for store in (first, second)]
            assert sum(bool(report.refused) for report in reports) == 1, "one of them is elected"
            assert all(report.adopted_segments == 0 for report in reports)
            assert [sealed for _, sealed in segments(files)] == [False]
            assert consume(second.get_many(keys(entries), soon())) == [entry.payload for entry in entries]


def test_an_erasure_outlives_its_index(files: PosixFileLayer) -> None:
    """L25: a rebuild from records does not bring back what was erased, also out of a dead writer's open segment."""
    mine, theirs = prefix("a", 5), prefix("b", 5, tenant=OTHER_TENANT)
    store = SegmentStore(files, DictIndex(), small(boot="dead"))
    durable(store, mine + theirs)
    store.drop_tenant(TENANT)
    later = prefix("c", 2)
    durable(store, later)
    abandon(store)
    with closing(SegmentStore(files, DictIndex(), small())) as again:
        again.collect()
        assert list(again.lookup(keys(mine), soon())) == [False] * 6
        assert consume(again.get_many(keys(theirs + later), soon())) == [e.payload for e in theirs + later]
        assert {entry.info.key for entry in again.scan()} == set(keys(theirs + later))
        assert again.verify().missing_in_index == 0


def test_a_reader_with_a_stale_row_sees_an_erasure(files: PosixFileLayer) -> None:
    """L25: another process's index cache may still know the row; the log of erasures is looked at before the read."""
    stale = DictIndex()
    with closing(SegmentStore(files, DictIndex(), small(boot="aa"))) as first:
        entries = prefix("a", 3)
        durable(first, entries)
        with closing(SegmentStore(files, stale, small(boot="bb"))) as second:
            held = second.get_many(keys(entries), soon())
            assert all(isinstance(result, Loaded) for result in held)
            first.drop_tenant(TENANT)
            assert consume(second.get_many(keys(entries), soon())) == [Miss.DROPPED] * 4
            assert list(second.lookup(keys(entries), soon())) == [False] * 4
            consume(held)


def test_a_dropped_namespace_leaves_no_segment(files: PosixFileLayer) -> None:
    with closing(SegmentStore(files, DictIndex(), small())) as store:
        durable(store, prefix("a", 20, length=30_000))
        dropped = store.drop_namespace(prefix("a", 1)[0].info.namespace)
        assert (dropped.blocks, dropped.snapshots) == (20, 1)
        store.collect()
        assert segments(files) == []
        assert store.stats().disk_bytes == 0


def test_what_a_crash_left_half_unlinked_goes(files: PosixFileLayer) -> None:
    index = DictIndex()
    with closing(SegmentStore(files, index, small())) as store:
        durable(store, prefix("a", 3))
    name, _ = segments(files)[0]
    files.rename(name.path, name.path.replace(".seg", ".gone"))
    with closing(SegmentStore(files, index, small())) as store:
        store.collect()
        assert list(files.list(name.bucket.directory)) == []
        assert store.stats().blocks == 0


def test_what_the_index_was_not_told_of_is_listed_when_it_is_back(files: PosixFileLayer) -> None:
    """Soon, though its segment is nearly empty; and an index that is away at the next try too loses nothing."""
    index = FakeOutage()
    with closing(SegmentStore(files, index, small(tick_s=1e9))) as store:
        entries = prefix("a", 3)
        known = index.put_many
        refusals = [3]

        def refuse(rows: object, deadline: float) -> None:
            if refusals[0]:
                refusals[0] -= 1
                raise IndexUnavailable("away")
            known(rows, deadline)

        index.put_many = refuse  # type: ignore[method-assign]
        assert store.put_many(entries).durable.result(timeout=60) == (False,) * 4
        own = store._parts.own
        assert own.wait_closed(own.paths(), 60), "it is sealed"
        for _ in range(2):
            store._parts._tick()
            assert not store._parts.committer.settled
        store._parts._tick()
        assert store._parts.committer.settled
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]


def test_what_is_being_put_while_the_store_is_closed_has_an_outcome(files: PosixFileLayer) -> None:
    """It was claimed before and is queued after (L6): the writer waits for it."""
    store = SegmentStore(files, DictIndex(), small())
    queue, writer = store._parts.entries, store._parts.writer
    add = queue.add
    closer = threading.Thread(target=store.close)

    def close_first(pendings: object) -> None:
        if not closer.ident:
            closer.start()
            while not queue._closed:
                threading.Event().wait(0.001)
            writer._thread.join(0.3)
        add(pendings)  # type: ignore[arg-type]

    queue.add = close_first  # type: ignore[method-assign]
    assert store.put_many(prefix("a", 3)).durable.result(timeout=60) == (True,) * 4
    closer.join()


def test_a_stale_row_that_leads_nowhere_is_not_announced_as_a_loss(files: PosixFileLayer, tmp_path: Path) -> None:
    """Another process moved the entry: only what the store has nowhere is said to be removed."""
    path, events = tmp_path / "index.sqlite", list[CacheChange]()
    stale, moved = block("a", 0), block("a", 1)
    with closing(SegmentStore(files, SqliteIndex(path), small(boot="aa"))) as first:
        durable(first, [stale, moved])
        with closing(SegmentStore(files, SqliteIndex(path), small(boot="bb"), events=events.append)) as second:
            consume(second.get_many(keys([stale, moved]), soon()))
            (row,) = [row for row in first._parts.index.scan(soon()) if row.key == moved.info.key]
            assert first.pin([moved.info.key]) == 1
            second._parts.reads.forget([row])
            assert not [event for event in events if isinstance(event, Removed)]
            assert consume(second.get_many([moved.info.key], soon())) == [moved.payload]
            (row,) = [row for row in first._parts.index.scan(soon()) if row.key == stale.info.key]
            second._parts.reads.forget([row])
            assert [event.keys for event in events if isinstance(event, Removed)] == [(stale.info.key,)]


def test_what_comes_after_an_erasure_stays(files: PosixFileLayer) -> None:
    """A tenant that goes on while it is erased loses what was before, in this process and in others, and nothing that
    it stores afterwards, also not when the index is rebuilt."""
    index = DictIndex()
    before = [prefix("a", 4), prefix("b", 4)]
    after = [prefix("c", 4), prefix("d", 4)]
    stop = threading.Event()
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(SegmentStore(files, index, small(boot=b)))) for b in ("aa", "bb"))
        durable(first, before[0])
        durable(second, before[1])

        def other_tenant() -> None:
            number = 0
            while not stop.is_set():
                first.put_many(prefix(f"other {number}", 2, tenant=OTHER_TENANT)).durable.result(20.0)
                number += 1

        noise = threading.Thread(target=other_tenant)
        noise.start()
        first.drop_tenant(TENANT)
        durable(first, after[0])
        durable(second, after[1])
        stop.set()
        noise.join()
        for store in (first, second):
            assert list(store.lookup(keys(before[0] + before[1]), soon())) == [False] * 10
            assert consume(store.get_many(keys(after[0] + after[1]), soon())) == [
                entry.payload for entry in after[0] + after[1]
            ]
    with closing(SegmentStore(files, DictIndex(), small())) as again:
        assert list(again.lookup(keys(before[0] + before[1]), soon())) == [False] * 10
        assert list(again.lookup(keys(after[0] + after[1]), soon())) == [True] * 10


def test_a_namespace_that_is_used_while_it_is_dropped_starts_again(files: PosixFileLayer) -> None:
    index = DictIndex()
    before, after = prefix("a", 4), prefix("b", 4)
    namespace = before[0].info.namespace
    with closing(SegmentStore(files, index, small(boot="aa"))) as first:
        with closing(SegmentStore(files, index, small(boot="bb"))) as second:
            durable(second, before)
            first.drop_namespace(namespace)
            assert list(second.lookup(keys(before), soon())) == [False] * 5
            durable(second, after)
            assert consume(first.get_many(keys(after), soon())) == [entry.payload for entry in after]
        first.collect()
        assert consume(first.get_many(keys(after), soon())) == [entry.payload for entry in after]
    with closing(SegmentStore(files, DictIndex(), small())) as again:
        assert {entry.info.key for entry in again.scan()} == set(keys(after))


def test_a_closed_store_answers_at_once(files: PosixFileLayer) -> None:
    """L6: whoever still holds it gets misses and refusals, also a read that was under way."""
    store = SegmentStore(files, DictIndex(), small())
    entries = prefix("a", 4)
    durable(store, entries)
    answers: list[list[Payload | Miss]] = []
    first = threading.Event()

    def read_on() -> None:
        while not answers or answers[-1][0] is not Miss.NOT_CONNECTED:
            answers.append(consume(store.get_many(keys(entries), soon())))
            first.set()

    reader = threading.Thread(target=read_on)
    reader.start()
    assert first.wait(20.0)
    store.close()
    reader.join(20.0)
    assert not reader.is_alive()
    right = [entry.payload for entry in entries]
    for answer in answers:
        for got, expected in zip(answer, right, strict=True):
            assert got in (expected, Miss.NOT_CONNECTED)
    assert store.put_many(entries).durable.result(0) == (False,) * 5
    assert list(store.lookup(keys(entries), soon())) == [False] * 5
    store.touch(keys(entries), RetentionClass.CHAT, TENANT)
    assert store.integrity() == ()


class FakeBug(DictIndex):
    """An index with a bug, for a while."""

    buggy = False

    def put_many(self, rows: object, deadline: float) -> None:  # type: ignore[override]
        if self.buggy:
            raise ZeroDivisionError
        super().put_many(rows, deadline)  # type: ignore[arg-type]


def test_a_bug_in_one_group_ends_no_thread(files: PosixFileLayer, caplog: pytest.LogCaptureFixture) -> None:
    """L13: what met it fails and says so; the store goes on."""

    def sink(change: CacheChange) -> None:
        raise KeyError("a listener's bug")

    index = FakeBug()
    with closing(SegmentStore(files, index, small(), events=sink)) as store:
        index.buggy = True
        ticket = store.put_many(prefix("a", 3))
        assert ticket.durable.result(20.0) == (False,) * 4
        index.buggy = False
        durable(store, prefix("a", 3))
        assert store.stats().failed_writes == {"internal": 4}
        assert store.integrity() == ()
    assert "ZeroDivisionError" in caplog.text
    assert "a listener's bug" in caplog.text


def test_writes_into_two_buckets_take_turns_in_two_segments(files: PosixFileLayer) -> None:
    """Re-appends of eviction go to older buckets than the writes of now; neither closes the other's segment."""
    wall = FakeWall()
    with closing(SegmentStore(files, DictIndex(), small(segment_bytes=4 << 20), wall=wall)) as store:
        start = wall.now
        for turn in range(10):
            wall.now = start + (turn % 2) * 86_400
            durable(store, prefix(f"chain {turn}", 3))
    assert len(segments(files)) == 2
    assert all(sealed for _, sealed in segments(files))


def test_a_tenant_at_its_quota_keeps_the_beginning_of_a_prompt(files: PosixFileLayer) -> None:
    """Of one put the prefix fits, and what is behind it is refused: a suffix without its prefix is of no use."""
    entries = prefix("a", 10, length=30_000, snapshot=0)
    room = 4 * record_bytes(30_000)
    with closing(SegmentStore(files, DictIndex(), small(tenant_bytes=room))) as store:
        ticket = store.put_many(entries)
        assert ticket.accepted == (True,) * 4 + (False,) * 6
        assert store.flush(10.0)
        assert ticket.durable.result(10.0) == ticket.accepted
        stats = store.stats()
        assert (stats.refused_quota, stats.refused_full) == (1, 5)
        again = store.put_many(entries[3:5])
        assert again.accepted == (False, False), "one is known, the other beyond the quota"
        assert again.durable.result(10.0) == again.accepted
