"""A full disk, IO errors, a lost index, a stale index, a clock that jumps, readers of what is being dropped."""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
from pathlib import Path
from typing import Self

import pytest

from headrace.kvcache.entries import EntryKind
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import PutTicket, Store, StoreError
from headrace.kvcache.store.retention.classes import DAY
from tests.torture.conftest import Tally, rounds
from tests.torture.disk import PowerDisk
from tests.torture.faults import FaultyDisk, FullDisk, broken_now_and_then, no_fault
from tests.torture.oracle import entry, key_of, numbers
from tests.torture.stores import Wall, acknowledged, open_segments, read, soon
from tests.torture.writer import open_real

ROUNDS = rounds(40, 6)
ENTRIES = 120


def put(store: Store, first: int, count: int = ENTRIES) -> list[tuple[list[Key], PutTicket]]:
    """Puts of one to ten entries each, all settled."""
    puts = []
    rng = random.Random(first)
    number = first
    while number < first + count:
        entries = [entry(n) for n in range(number, min(number + rng.randint(1, 10), first + count))]
        number += len(entries)
        puts.append(([e.info.key for e in entries], store.put_many(entries)))
        if rng.random() < 0.3:
            assert store.flush(30.0)
    assert store.flush(30.0)
    return puts


def must_come(store: Store, sure: set[Key], below: int) -> None:
    came, _ = read(store, [key_of(number) for number in range(below)])
    assert not sure - came, f"acknowledged and lost: {numbers(sure - came, below)}"


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("calls", [("truncate",), ("pwritev",), ("truncate", "pwritev")])
def test_a_full_disk_refuses_and_loses_nothing(seed: int, calls: tuple[str, ...], tally: Tally) -> None:
    """ENOSPC when a file grows, or, where nothing can be preallocated, at any write."""
    rng = random.Random(seed)
    disk, index, wall = FaultyDisk(PowerDisk(), rng), DictIndex(), Wall()
    store = open_segments(disk, index, wall)
    full = disk.fault = FullDisk(rng.randint(100_000, 500_000), calls)
    puts = put(store, 0)
    refused = ENTRIES - len(acknowledged(puts))
    assert full.refused
    assert refused
    assert store.stats().failed_writes.get("ENOSPC")
    must_come(store, acknowledged(puts), ENTRIES)

    full.room = 1 << 40
    later = put(store, ENTRIES)
    assert len(acknowledged(later)) == ENTRIES, "there is room again"
    sure = acknowledged(puts) | acknowledged(later)
    store.close()
    store = open_segments(disk, index, wall)
    store.collect()
    must_come(store, sure, 2 * ENTRIES)
    store.close()
    index.lose()
    store = open_segments(disk, index, wall)
    must_come(store, sure, 2 * ENTRIES)
    store.close()
    tally.add("full disk (ENOSPC)", times=1, refused_writes=refused, read_back=len(sure))


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize(
    "calls",
    [
        ("pwritev",),
        ("datasync",),
        ("preadv", "open"),
        ("create", "truncate", "rename", "unlink", "rmdir", "sync_directory"),
        ("pwritev", "datasync", "preadv", "open", "create", "truncate", "rename", "unlink", "sync_directory"),
    ],
    ids=lambda calls: calls[0] + "…" * (len(calls) > 1),
)
def test_io_errors_are_misses_and_refusals(seed: int, calls: tuple[str, ...], tally: Tally) -> None:
    """EIO: what was acknowledged before, between or after comes once the disk answers again."""
    rng = random.Random(seed)
    disk, index, wall = FaultyDisk(PowerDisk(), rng), DictIndex(), Wall()
    store = open_segments(disk, index, wall)
    disk.fault = broken_now_and_then(rng, rng.choice([0.02, 0.1, 0.5]), calls)
    puts = put(store, 0)
    read(store, [key_of(number) for number in range(ENTRIES)])
    with contextlib.suppress(StoreError):  # an operator is told that the sweep broke off
        store.collect()
    puts += put(store, ENTRIES)
    store.close()
    disk.fault = no_fault

    sure = acknowledged(puts)
    store = open_segments(disk, index, wall)
    store.collect()
    must_come(store, sure, 2 * ENTRIES)
    store.close()
    index.lose()
    store = open_segments(disk, index, wall)
    must_come(store, sure, 2 * ENTRIES)
    store.close()
    tally.add("EIO", times=1, refused_writes=2 * ENTRIES - len(sure), read_back=len(sure))


def test_an_index_lost_under_a_running_store_is_refilled(tmp_path: Path, tally: Tally) -> None:
    """The file of the index is deleted again and again while the store writes and reads."""
    sure: set[Key] = set()
    lost = 0
    for turn in range(3):
        store = open_real(tmp_path, secrets.token_hex(6))
        for part in range(2):
            puts = put(store, (2 * turn + part) * ENTRIES)
            sure |= acknowledged(puts)
            for file in tmp_path.glob("index.sqlite*"):
                file.unlink()
            lost += 1
            read(store, [key_of(number) for number in range((2 * turn + part + 1) * ENTRIES)])
        store.close()
    store = open_real(tmp_path, secrets.token_hex(6))
    must_come(store, sure, 6 * ENTRIES)
    store.close()
    tally.add("lost index", times=lost, read_back=len(sure))


def test_a_stale_index_is_a_hint(tally: Tally) -> None:
    """L3: rows that point anywhere: to other records, into the middle of them, behind the file, to files that are gone,
    with other lengths. Whatever comes is right; a key that was put again comes."""
    rng = random.Random(9)
    disk, index, wall = PowerDisk(), DictIndex(), Wall()
    store = open_segments(disk, index, wall)
    puts = put(store, 0, 4 * ENTRIES)
    assert len(acknowledged(puts)) == 4 * ENTRIES
    rows = list(index.scan(soon()))
    groups = [*{row.group for row in rows}, "v1/gone/torture-ff-1.seg", rows[0].group.replace("-1.seg", "-99.seg")]

    def spoil(row: IndexRow) -> IndexRow:
        other = rng.choice(rows)
        match rng.randrange(7):
            case 0:
                return row._replace(group=other.group, place=other.place)
            case 1:
                return row._replace(group=other.group, place=other.place, length=other.length)
            case 2:
                return row._replace(place=rng.randrange(1 << 20))
            case 3:
                return row._replace(place=rng.choice([1 << 40, (1 << 63) - 1, 1 << 63, 1 << 100]))
            case 4:
                return row._replace(length=rng.choice([1, row.length + 1, 1 << 22, (1 << 32) - 1]))
            case 5:
                return row._replace(kind=EntryKind.SNAPSHOT)
            case _:
                return row._replace(group=rng.choice(groups))

    spoiled = [spoil(row) for row in rows]
    index.put_many(spoiled, soon())
    keys = [row.key for row in rows]
    came, misses = read(store, keys)
    came |= read(store, keys, batch=1)[0]  # a row of 4 GiB finds no buffer beside others: a miss of the moment (BUSY)
    tally.add("stale index", wrong_rows=len(rows), misses=misses)
    # Every miss took its row along, so that the prefix is stored anew instead of being missed until it expires.
    missing = [number for number in range(4 * ENTRIES) if key_of(number) not in came]
    for start in range(0, len(missing), 20):
        ticket = store.put_many([entry(number) for number in missing[start : start + 20]])
        assert all(ticket.accepted)
        assert all(ticket.durable.result(timeout=60.0))
    must_come(store, set(keys), 4 * ENTRIES)
    store.close()


class Readers:
    """Threads that read random entries and judge them until the end of the block."""

    def __init__(self, store: Store, below: int, threads: int = 3) -> None:
        self.came = 0
        self.misses = 0
        self._store = store
        self._below = below
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._read, args=(seed,)) for seed in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self._failures
        assert self.came
        assert self.misses

    def _read(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self._stop.is_set():
                came, misses = read(self._store, [key_of(rng.randrange(self._below)) for _ in range(16)])
                self.came += len(came)
                self.misses += misses
        except BaseException as error:
            self._failures.append(error)
            raise


def test_a_reader_of_what_is_dropped_gets_it_whole_or_not_at_all(tally: Tally) -> None:
    """L4: buckets are dropped and unlinked under readers."""
    store = open_segments(PowerDisk(), DictIndex(), Wall())
    with Readers(store, ENTRIES * 8) as readers:
        for turn in range(8):
            put(store, turn * ENTRIES)
            if turn % 2:
                for bucket in {found.bucket for found in store.scan()}:
                    store.drop_bucket(bucket)
                store.collect()
    tally.add("reader while buckets are dropped", came=readers.came, misses=readers.misses)
    store.close()


def test_a_reader_during_eviction_gets_what_is_there_right(tally: Tally) -> None:
    """L4: a store of a fifth of what is put evicts all the time, under readers that use some of it."""
    store = open_segments(PowerDisk(), DictIndex(), Wall(), capacity_bytes=2 << 20)
    with Readers(store, ENTRIES * 8) as readers:
        for turn in range(8):
            for first in range(turn * ENTRIES, (turn + 1) * ENTRIES, 20):
                store.put_many([entry(number) for number in range(first, first + 20)])
                store.flush(30.0)
                store.collect()
    stats = store.stats()
    assert stats.evicted_entries
    assert stats.disk_bytes <= stats.capacity_bytes
    tally.add("reader during eviction", came=readers.came, misses=readers.misses, evicted=stats.evicted_entries)
    store.close()


def test_a_clock_that_jumps_loses_nothing(tally: Tally) -> None:
    """A wall clock set years ahead, or back: nothing is unlinked by it, and all comes when the clock is right again."""
    disk, index, wall = PowerDisk(), DictIndex(), Wall()
    store = open_segments(disk, index, wall)
    sure = acknowledged(put(store, 0))
    assert len(sure) == ENTRIES
    store.collect()
    start = wall.now
    for jump in (3650 * DAY, -30 * DAY, 365 * DAY, 0):
        wall.now = start + jump
        report = store.collect()
        came, misses = read(store, [key_of(number) for number in range(ENTRIES)])
        assert len(came) + misses == ENTRIES
        if jump > 7 * DAY:
            assert not came, "what has expired is not read"
            assert report.refused, "the sweeper must not trust a clock that jumped"
        tally.add("clock jump", times=1)
    must_come(store, sure, ENTRIES)
    store.close()


def test_two_writers_of_the_same_entries(tmp_path: Path, tally: Tally) -> None:
    """Both put the same keys at once into one directory and one index; each acknowledged one comes from either."""
    stores = [open_real(tmp_path, secrets.token_hex(6)) for _ in range(2)]
    puts: list[list[tuple[list[Key], PutTicket]]] = [[], []]

    def write(place: int) -> None:
        puts[place] = put(stores[place], 0)

    threads = [threading.Thread(target=write, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sure = acknowledged(puts[0]) | acknowledged(puts[1])
    assert len(sure) == ENTRIES
    for store in stores:
        must_come(store, sure, ENTRIES)
        store.collect()
        must_come(store, sure, ENTRIES)
    stores[0].close()
    must_come(stores[1], sure, ENTRIES)
    stores[1].close()
    tally.add("two writers", entries_of_both=ENTRIES, read_back=len(sure))


def test_a_boot_id_serves_one_process_at_a_time(tmp_path: Path) -> None:
    """Two writers of one name would write into one file."""
    store = open_real(tmp_path, "ab")
    with pytest.raises(StoreError):
        open_real(tmp_path, "ab")
    store.close()
