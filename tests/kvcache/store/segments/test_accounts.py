"""What a process knows of its store's sizes is what the index and the segments say (L11), whatever happened."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.kvcache.entries import EntryKind, RetentionClass
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.store.base import PutEntry
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.record import record_bytes
from headrace.kvcache.store.segments.settings import SegmentSettings
from headrace.kvcache.store.segments.table import SegmentTable
from tests.kvcache.store.entries import (
    NAMESPACE,
    OTHER_NAMESPACE,
    OTHER_TENANT,
    TENANT,
    FakeWall,
    block,
    consume,
    keys,
    prefix,
    soon,
)

SETTINGS = SegmentSettings(
    node="n",
    segment_bytes=128 * 1024,
    queue_bytes=16 << 20,
    read_buffer_bytes=4 << 20,
    read_threads=2,
    sync_idle_s=0.005,
    sweep_s=3600,
    tick_s=3600,
)
Open = Callable[..., SegmentStore]


@pytest.fixture
def wall() -> FakeWall:
    return FakeWall()


@pytest.fixture
def open_store(tmp_path: Path, wall: FakeWall) -> Iterator[Open]:
    opened: list[SegmentStore] = []

    def build(index: DictIndex, **changes: object) -> SegmentStore:
        settings = replace(SETTINGS, boot=f"{len(opened):x}", **changes)  # type: ignore[arg-type]
        opened.append(SegmentStore(PosixFileLayer(tmp_path / "store"), index, settings, wall=wall))
        return opened[-1]

    yield build
    for store in opened:
        store.close()


def assert_exact(table: SegmentTable, rows: list[IndexRow]) -> None:
    blocks, snapshots, payload, *_ = table.totals()
    kinds = Counter(row.kind for row in rows)
    assert (blocks, snapshots) == (kinds[EntryKind.BLOCK], kinds[EntryKind.SNAPSHOT])
    assert payload == sum(row.length for row in rows)
    tenants: Counter[bytes] = Counter()
    for row in rows:
        tenants[row.tenant_tag] += record_bytes(row.length)
    assert table.tenants() == tenants
    groups = {view.path: view.live_bytes for view in table.views() if view.live_records}
    assert set(groups) == {row.group for row in rows}
    assert sum(groups.values()) == sum(tenants.values())


def spoil(root: Path, row: IndexRow) -> None:
    """Other bytes where a record's payload lies."""
    with (root / row.group).open("r+b") as file:
        file.seek(row.place + record_bytes(row.length) // 2)
        file.write(b"spoilt")


@pytest.mark.parametrize("seed", range(2))
def test_every_path_leaves_exact_accounts(open_store: Open, wall: FakeWall, tmp_path: Path, seed: int) -> None:
    """Puts, uses, pins, drops of all kinds, eviction, expiry, damage, a lost index: at rest the table agrees with the
    index, and every row of the index with a record of a segment."""
    dice = random.Random(seed)
    index = DictIndex()
    store = open_store(index, capacity_bytes=6 << 20, tenant_bytes=3 << 20)
    chains: list[list[PutEntry]] = []
    for step in range(30):
        chosen = dice.choice(chains) if chains else []
        rows = list(index.scan(soon()))
        match dice.choice(("put", "put", "put", "use", "pin", "tenant", "namespace", "bucket", "time", "bad", "lose")):
            case "put":
                tenant, namespace = dice.choice((TENANT, OTHER_TENANT)), dice.choice((NAMESPACE, OTHER_NAMESPACE))
                retention = dice.choice((RetentionClass.AGENT, RetentionClass.CHAT))
                chains.append(prefix(f"{step}", dice.randint(1, 60), namespace=namespace, tenant=tenant))
                store.put_many(chains[-1] if retention is RetentionClass.CHAT else chains[-1][:-1])
            case "use":
                store.touch(keys(chosen), RetentionClass.CHAT, TENANT)
            case "pin":
                store.pin(keys(chosen[:3]))
            case "tenant":
                store.drop_tenant(OTHER_TENANT)
            case "namespace":
                store.drop_namespace(OTHER_NAMESPACE)
            case "bucket" if rows:
                store.drop_bucket(dice.choice(rows).group.removeprefix("v1/").rpartition("/")[0])
            case "time":
                wall.now += 86_400
                store.collect()
                assert store.collect().refused == ""
            case "bad" if rows:
                row = dice.choice(rows)
                spoil(tmp_path / "store", row)
                consume(store.get_many([row.key], soon()))
            case "lose":
                index.lose()
                while not store._parts.rebuilder.run_once():
                    pass
        assert store.flush(60)
        if dice.random() < 0.3:
            store.collect()
        rows = list(index.scan(soon()))
        assert_exact(store.table, rows)
        recorded = {entry.info.key for entry in store.scan()}
        assert {row.key for row in rows} <= recorded
        assert store.integrity() == ()


def row(number: int, segment: str) -> IndexRow:
    info = block("a", number).info
    return IndexRow(info.key, segment, number << 20, info.length, info.kind, info.retention, 128, 0, TENANT)


SEGMENT = f"v1/{NAMESPACE.hex()}/chat/1900000000/n-1-1.seg"


def test_what_happens_while_the_index_is_read_counts(open_store: Open) -> None:
    """A record that is added behind the reader, and one that goes behind it."""
    table = SegmentTable()
    table.add([row(0, SEGMENT), row(1, SEGMENT)])

    def scan() -> Iterator[IndexRow]:
        yield row(0, SEGMENT)
        yield row(1, SEGMENT)
        table.add([row(2, SEGMENT)])
        table.remove([row(0, SEGMENT), row(1, SEGMENT)])

    table.replace(scan())
    assert_exact(table, [row(2, SEGMENT)])


def test_a_segment_that_is_gone_takes_along_what_was_counted_in_it() -> None:
    """Its record was written again elsewhere without anybody saying that it replaced this one."""
    table = SegmentTable()
    table.add([row(0, SEGMENT)])
    table.forget(SEGMENT)
    assert_exact(table, [])


def test_a_process_that_does_not_sweep_learns_that_a_tenant_has_room_again(open_store: Open) -> None:
    """It had counted what it wrote itself, and nothing of what the sweeper took from the tenant since."""
    index = DictIndex()
    sweeper = open_store(index, tenant_bytes=400_000)
    assert sweeper.collect().refused == ""
    worker = open_store(index, tenant_bytes=400_000)
    accepted = worker.put_many(prefix("a", 60, snapshot=0)).accepted
    assert worker.flush(60)
    assert sum(accepted) == 32
    assert sweeper.collect().refused == ""
    held = len(list(index.scan(soon())))
    assert held < 28
    worker._parts.sweeper._stop.set()
    worker._parts.sweeper._thread.join()
    worker._parts.sweeper._stop = OneRound()
    worker._parts.sweeper._run()
    assert sum(worker.put_many(prefix("b", 60, snapshot=0)).accepted) == 32 - held
    assert worker.flush(60)


class OneRound:
    """A stop that is set after the first round."""

    def __init__(self) -> None:
        self.done = False

    def is_set(self) -> bool:
        return self.done

    def wait(self, timeout: float) -> None:
        self.done = True

    def set(self) -> None:
        self.done = True
