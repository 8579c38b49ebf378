"""What is offered is copied, told once, and unpinned whatever happens (L7, L11, L17)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from headrace.kvcache.entries import EntryInfo, EntryKind, RetentionClass, payload_digest
from headrace.kvcache.keys import Key
from headrace.kvcache.pool import KVPool
from headrace.kvcache.tier.types import CacheScope, Lacking, PrefixUse, TierWrite, WriteRow
from headrace.kvcache.tier.writer import TierWriter
from tests.kvcache.tier.fakes import FakeStore, until
from tests.kvcache.tier.test_plan import BLOCK, V41

SCOPE = CacheScope(b"n" * 32, b"t" * 16)


class FakeHost:
    """A host tier in a dictionary."""

    def __init__(self) -> None:
        self.entries: dict[Key, tuple[EntryInfo, bytes]] = {}
        self.touched: list[Key] = []

    def wants(self, key: Key) -> bool:
        return key not in self.entries

    def put(self, info: EntryInfo, payload: memoryview) -> bool:
        self.entries[info.key] = (info, bytes(payload))
        return True

    def touch(self, keys: object) -> None:
        self.touched.extend(keys)  # type: ignore[call-overload]


class Bench:
    """A pool with recognisable bytes, and a writer over fakes."""

    def __init__(self) -> None:
        self.pool = KVPool(V41, num_rows=9, num_slots=2, num_snapshots=4)
        for index in range(9):
            self.pool.rows[index] = index
        for index in range(4):
            self.pool.snapshots[index] = 100 + index
        self.store, self.host = FakeStore(), FakeHost()
        self.unpinned: list[str] = []
        self.lacking: list[Lacking] = []
        self.writer = TierWriter(
            self.pool,
            host=self.host,
            store=self.store,
            unpin=lambda pins: self.unpinned.extend(pins),
            offer=self.lacking.append,
        )
        self.writer.start()

    def offer(self, pin: str, blocks: range, snapshots: range = range(0)) -> TierWrite:
        rows = tuple(WriteRow(bytes([n]) * 32, bytes([n - 1]) * 32, n * BLOCK, n) for n in blocks)
        marks = tuple(WriteRow(bytes([50 + n]) * 32, bytes([n]) * 32, n * BLOCK, n) for n in snapshots)
        write = TierWrite(pin, SCOPE, RetentionClass.CHAT, rows, marks)
        self.writer(write)
        return write

    def settle(self) -> None:
        until(lambda: self.writer.idle)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    assert bench.writer.close(20.0)


def test_bytes_go_to_host_and_store_prefix_first(bench: Bench) -> None:
    """Exactly the pool's bytes, described in full, blocks before snapshots."""
    bench.offer("tier:1", range(1, 5), range(2, 4))
    bench.settle()
    assert bench.unpinned == ["tier:1"]
    assert bench.store.puts == [bytes([n]) * 32 for n in (1, 2, 3, 4, 52, 53)]
    info, payload = bench.store.source.entries[bytes([3]) * 32]
    assert payload == bytes([3]) * V41.block_bytes
    assert (info.parent, info.tokens, info.namespace, info.tenant_tag) == (bytes([2]) * 32, 48, b"n" * 32, b"t" * 16)
    assert (info.digest, info.retention) == (payload_digest(payload), RetentionClass.CHAT)
    info, payload = bench.host.entries[bytes([53]) * 32]
    assert (info.kind, payload) == (EntryKind.SNAPSHOT, bytes([103]) * V41.snapshot_bytes)
    stats = bench.writer.stats()
    assert (stats.blocks, stats.snapshots, stats.accepted, stats.durable, stats.in_flight) == (4, 2, 6, 6, 0)


def test_what_the_store_has_is_touched_instead(bench: Bench) -> None:
    """Deduplicated by key; a use prolongs what is there."""
    bench.offer("tier:1", range(1, 4))
    bench.settle()
    bench.offer("tier:2", range(1, 6))
    bench.settle()
    assert len(bench.store.puts) == 5
    assert bench.store.touched == [(tuple(bytes([n]) * 32 for n in (1, 2, 3)), RetentionClass.CHAT)]
    assert bench.writer.stats().copied_bytes == 5 * V41.block_bytes
    assert bench.writer.stats().known == 3


def test_a_full_or_broken_store_costs_entries_only(bench: Bench) -> None:
    """L17: refused or failed writes are counted, everything is unpinned, later writes go on."""
    bench.store.full = True
    bench.offer("tier:1", range(1, 4))
    bench.settle()
    assert bench.writer.stats().refused == 3
    bench.store.full, bench.store.broken = False, True
    bench.offer("tier:2", range(1, 4))
    bench.settle()
    assert bench.writer.stats().failed == 1
    bench.store.broken = False
    bench.offer("tier:3", range(1, 4))
    bench.settle()
    assert bench.unpinned == ["tier:1", "tier:2", "tier:3"]
    assert len(bench.store.source.entries) == 3


def test_durable_comes_later_and_may_fail(bench: Bench) -> None:
    """Accepted is not durable; what is lost in between is counted as lost."""
    bench.store.hold = []
    bench.offer("tier:1", range(1, 5))
    bench.settle()
    assert (bench.writer.stats().in_flight, bench.writer.stats().durable) == (4, 0)
    ((future, accepted),) = bench.store.hold
    future.set_result((True, True, False, False))
    assert accepted == (True,) * 4
    stats = bench.writer.stats()
    assert (stats.in_flight, stats.durable, stats.lost) == (0, 2, 2)


def test_nothing_is_read_before_its_kernels_have_run(bench: Bench) -> None:
    """On a GPU the rows of a step without samples are not written yet when they are named."""

    class Mark:
        passed = threading.Event()

        def query(self) -> bool:
            return self.passed.is_set()

    rows = (WriteRow(bytes([7]) * 32, bytes(32), BLOCK, 7),)
    bench.writer(TierWrite("tier:1", SCOPE, RetentionClass.CHAT, rows, (), Mark()))
    assert bench.store.puts == []
    bench.pool.rows[7] = 77
    Mark.passed.set()
    bench.settle()
    assert bench.store.source.entries[bytes([7]) * 32][1] == bytes([77]) * V41.block_bytes


def test_a_use_is_told_to_both(bench: Bench) -> None:
    """The part of a prefix that the device pool had is read from there, and counts below all the same; what the store
    lacks of it is asked for. BATCH prolongs and asks nothing."""
    blocks = tuple(bytes([n]) * 32 for n in range(1, 5))
    use = PrefixUse(SCOPE, RetentionClass.AGENT, bytes(32), blocks, BLOCK, b"s" * 32)
    bench.offer("tier:1", range(1, 3))
    bench.settle()
    bench.writer.used(use)
    bench.writer.used(replace(use, retention=None))
    assert bench.writer.close(20.0)
    assert bench.store.touched == [((*blocks, b"s" * 32), RetentionClass.AGENT)]
    assert bench.host.touched == [*use.keys, *use.keys]
    lacking = ((blocks[2], blocks[1], 3 * BLOCK), (blocks[3], blocks[2], 4 * BLOCK))
    snapshot = (b"s" * 32, blocks[3], 4 * BLOCK)
    assert bench.lacking == [Lacking(SCOPE, RetentionClass.AGENT, lacking, (snapshot,))]


def test_close_copies_what_was_offered(bench: Bench) -> None:
    """A drain loses nothing that was offered."""
    for number in range(1, 5):
        bench.offer(f"tier:{number}", range(number, number + 2))
    assert bench.writer.close(20.0)
    assert len(bench.unpinned) == 4
    assert len(bench.store.source.entries) == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_rows_of_a_device_are_copied_through_staging() -> None:
    """The bytes of device memory, more of them than the staging buffer holds at once."""
    from headrace.kvcache.tier.copies import PoolReader

    pool = KVPool(V41, num_rows=300, num_slots=2, num_snapshots=4, device="cuda")
    pool.rows.copy_(torch.arange(300, dtype=torch.int64).remainder(251).to(torch.uint8)[:, None].expand_as(pool.rows))
    reader = PoolReader(pool)
    reader._staging = reader._staging[: 7 * V41.block_bytes]
    places = [5, 299, 1, *range(10, 40)]
    copied = [bytes(view) for view in reader.read(pool.rows, places)]
    assert copied == [bytes([place % 251]) * V41.block_bytes for place in places]


def test_late_durability_after_close(bench: Bench) -> None:
    """The store may still finish when the writer has ended."""
    bench.store.hold = []
    bench.offer("tier:1", range(1, 3))
    assert bench.writer.close(20.0)
    ((future, _),) = bench.store.hold
    assert isinstance(future, Future)
    future.set_result((True, True))
    assert bench.writer.stats().durable == 2
