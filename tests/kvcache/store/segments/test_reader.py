"""Reads: until the deadline and no longer, in few large requests, without ever losing a buffer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.kvcache.entries import Loaded, Miss
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.store.segments.buffers import BufferPool
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.handles import SegmentFiles
from headrace.kvcache.store.segments.reader import SegmentReader
from headrace.kvcache.store.segments.record import record_bytes
from headrace.kvcache.store.segments.settings import SegmentSettings
from tests.kvcache.store.entries import consume, keys, prefix, soon
from tests.kvcache.store.segments.fake_files import FakeLayer

BLOCKS = 8
ENTRIES = prefix("a", BLOCKS, length=5_000, snapshot=0)
SIZE = record_bytes(5_000)


class Fixture:
    """Blocks in one segment, and a reader with buffers for six of them."""

    def __init__(self, root: Path) -> None:
        self.files = FakeLayer(root)
        index = DictIndex()
        store = SegmentStore(self.files, index, SegmentSettings(sync_idle_s=0.005))
        assert all(store.put_many(ENTRIES).durable.result(20.0))
        rows = [row for row in index.get_many(keys(ENTRIES), soon()) if row is not None]
        assert len(rows) == BLOCKS
        self.rows: list[IndexRow] = rows
        store.close()
        self.files.reads.clear()
        self.buffers = BufferPool(6 * SIZE)
        self.handles = SegmentFiles(self.files, 4, direct=True)
        self.reader = SegmentReader(self.handles, self.buffers, 2, 4 * SIZE, 0.0)
        while self.files.reading.acquire(blocking=False):
            pass


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    made = Fixture(tmp_path)
    yield made
    made.files.gate.set()
    made.reader.close()
    made.handles.close()
    assert made.buffers.taken == 0


def payloads(count: int) -> list[object]:
    return [entry.payload for entry in ENTRIES[:count]]


def test_neighbours_are_read_together(fixture: Fixture) -> None:
    """Whatever the order of the request; at most `read_bytes` at once."""
    order = [3, 0, 5, 1, 2, 4]
    got = consume(fixture.reader.read([fixture.rows[place] for place in order], soon()))
    assert got == [ENTRIES[place].payload for place in order]
    assert sorted(fixture.files.reads) == [(0, 4 * SIZE), (4 * SIZE, 2 * SIZE)]


def test_a_gap_ends_a_run(fixture: Fixture) -> None:
    consume(fixture.reader.read([fixture.rows[place] for place in (0, 2, 3)], soon()))
    assert sorted(fixture.files.reads) == [(0, SIZE), (2 * SIZE, 2 * SIZE)]


def test_a_late_read_is_a_miss_and_keeps_its_buffer(fixture: Fixture) -> None:
    """L6, L7: the caller is answered at its deadline; the buffer is free again only when the disk has let go of it."""
    fixture.files.gate.clear()
    begun = time.monotonic()
    results = fixture.reader.read(fixture.rows[:3], begun + 0.05)
    assert results == [Miss.TIMEOUT] * 3
    assert fixture.files.reading.acquire(timeout=60.0)
    assert fixture.buffers.taken == 3 * SIZE
    fixture.files.gate.set()
    assert consume(fixture.reader.read(fixture.rows[3:6], soon())) == [entry.payload for entry in ENTRIES[3:6]]
    whole = fixture.buffers.take(6 * SIZE, soon())
    assert whole is not None
    fixture.buffers.give(whole)


def test_what_waits_behind_a_stalled_disk_is_not_read_at_all(fixture: Fixture) -> None:
    fixture.files.gate.clear()
    for _ in range(2):
        assert fixture.reader.read(fixture.rows[:1], soon(0.0)) == [Miss.TIMEOUT]
    assert fixture.reader.read(fixture.rows[:2], soon(0.02)) == [Miss.TIMEOUT] * 2
    fixture.files.gate.set()
    assert consume(fixture.reader.read(fixture.rows[:1], soon())) == payloads(1)


def test_without_a_buffer_the_suffix_is_a_miss(fixture: Fixture) -> None:
    """L12: bounded memory. The prefix comes; what is held is not overwritten."""
    held = fixture.reader.read(fixture.rows[:2], soon())
    results = fixture.reader.read(fixture.rows, soon())
    assert [isinstance(result, Loaded) for result in results] == [True] * 4 + [False] * 4
    assert results[4:] == [Miss.BUSY] * 4
    assert consume(held) == payloads(2)
    assert consume(results)[:4] == payloads(4)


def test_rows_that_lie_are_misses(fixture: Fixture) -> None:
    """L3: a hint that points to another record, another length, another file, or nowhere."""
    row, other = fixture.rows[0], fixture.rows[1]
    lies = [
        (row._replace(place=other.place), Miss.HEADER),
        (row._replace(length=4_999), Miss.HEADER),
        (row._replace(length=1), Miss.HEADER),
        (row._replace(place=row.place + 4096), Miss.HEADER),
        (row._replace(place=row.place + 1), Miss.HEADER),
        (row._replace(place=1 << 40), Miss.SHORT),
        (row._replace(group=row.group.replace("-1.seg", "-2.seg")), Miss.ABSENT),
        (row._replace(length=1 << 31), Miss.HEADER),
    ]
    for lie, miss in lies:
        fixture.files.reads.clear()
        assert fixture.reader.read([lie], soon()) == [miss], lie
    assert consume(fixture.reader.read([row, other], soon())) == payloads(2)


def test_a_segment_under_another_name_is_not_read(fixture: Fixture, tmp_path: Path) -> None:
    """L1: a record says which segment it belongs to; a copied or restored file is another one."""
    row = fixture.rows[0]
    copy = row.group.replace("-1.seg", "-9.seg")
    (tmp_path / copy).write_bytes((tmp_path / row.group).read_bytes())
    assert fixture.reader.read([row._replace(group=copy)], soon()) == [Miss.HEADER]
