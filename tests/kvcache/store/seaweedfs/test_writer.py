"""What becomes of entries when the index, or a part of the cluster, fails between put_many and durable."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.tier_harness.weed import WeedCluster
from headrace.kvcache.cache_events import CacheChange, Stored
from headrace.kvcache.entries import Miss
from headrace.kvcache.index.base import IndexRow, IndexUnavailable
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.seaweedfs.cluster import Grant
from headrace.kvcache.store.seaweedfs.reader import ReadResult
from tests.kvcache.store.entries import TENANT, consume, key_of, keys, prefix, soon
from tests.kvcache.store.seaweedfs.nodes import durable, node


class FailingIndex(DictIndex):
    """An index that does not answer gets, or puts, while it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.no_gets = False
        self.no_puts = False

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[IndexRow | None]:
        if self.no_gets:
            raise IndexUnavailable("no gets now")
        return super().get_many(keys, deadline)

    def put_many(self, rows: Sequence[IndexRow], deadline: float) -> None:
        if self.no_puts:
            raise IndexUnavailable("no puts now")
        super().put_many(rows, deadline)


def test_without_the_index_nothing_is_written(weed: WeedCluster) -> None:
    """L17: nobody could find it, and whether it is there already nobody can say."""
    index = FailingIndex()
    with node(weed, "noindex", index) as store:
        entries = prefix("a", 3)
        index.no_gets = True
        assert store.put_many(entries).durable.result(timeout=60.0) == (False,) * 4
        assert store.stats().failed_writes == {"index": 4}
        index.no_gets = False
        assert not list(store.scan())
        durable(store, entries)


def test_what_the_index_did_not_take_is_not_durable_and_a_rebuild_finds_it(weed: WeedCluster) -> None:
    index = FailingIndex()
    with node(weed, "orphans", index) as store:
        entries = prefix("a", 3)
        index.no_puts = True
        assert store.put_many(entries).durable.result(timeout=60.0) == (False,) * 4
        assert not any(store.lookup(keys(entries), soon()))
        index.no_puts = False
        assert store.verify().missing_in_index == 4
        assert {entry.info.key for entry in store.scan()} == set(keys(entries))
    with node(weed, "orphans") as store:
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]


def test_records_that_did_not_arrive_go_elsewhere(weed: WeedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer file ids than asked for, or a server that is not there: the batch goes on with new ids, and each entry is
    stored and announced once."""
    events: list[CacheChange] = []
    with node(weed, "elsewhere") as store:
        store._writer._events = events.append
        assign = store._cluster.assign
        grants: list[Grant] = []

        def stingy(collection: str, ttl: str, count: int, deadline: float) -> Grant:
            grant = assign(collection, ttl, min(count, 2), deadline)
            dead = Grant(grant.volume, grant.first, grant.cookie, grant.count, "127.0.0.1:1")
            grants.append(grant if len(grants) != 1 else dead)
            return grants[-1]

        monkeypatch.setattr(store._cluster, "assign", stingy)
        entries = prefix("a", 5)
        durable(store, entries)
        assert len(grants) == 4, "3 pairs of ids, and one that led nowhere"
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        told = [key for event in events if isinstance(event, Stored) for key in event.keys]
        assert sorted(told) == sorted(keys(entries))
        assert store.stats().failed_writes == {}


def test_a_defect_in_a_batch_ends_its_tickets(weed: WeedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """L6: no ticket stays open, and the thread lives on."""
    with node(weed, "defect") as store:

        def broken(*_: object) -> Grant:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(store._cluster, "assign", broken)
            assert store.put_many(prefix("a", 1)).durable.result(timeout=60.0) == (False, False)
        assert store.stats().failed_writes == {"internal": 2}
        assert store.stats().queued_bytes == 0
        durable(store, prefix("a", 1))


def test_only_reads_count_absence(weed: WeedCluster) -> None:
    """Asking what is there is no miss."""
    with node(weed, "asking") as store:
        store.lookup([key_of("never")], soon())
        store.find([key_of("never")], soon())
        assert not store.stats().misses
        assert store.get_many([key_of("never")], soon()) == [Miss.ABSENT]
        assert store.stats().misses == {Miss.ABSENT: 1}


def test_a_closed_store_knows_nothing_and_takes_nothing(weed: WeedCluster) -> None:
    with node(weed, "closed") as store:
        entries = prefix("a", 1)
        durable(store, entries)
    assert not any(store.lookup(keys(entries), soon()))
    assert list(store.get_many(keys(entries), soon())) == [Miss.NOT_CONNECTED] * 2
    store.touch(keys(entries), entries[0].info.retention, entries[0].info.tenant_tag)
    with pytest.raises(StoreError, match="closed"):
        store.put_many(entries)


def test_reads_beyond_the_budget_are_misses(weed: WeedCluster) -> None:
    """L12: bytes that nobody has released yet are bounded."""
    with node(weed, "budget", read_bytes=12_000, busy_wait_s=0.01, readers=1) as store:
        entries = prefix("a", 4, snapshot=0)
        durable(store, entries)
        held = store.get_many(keys(entries[:2]), soon())
        (busy,) = store.get_many(keys(entries[2:3]), soon())
        assert busy is Miss.BUSY
        assert store.stats().misses[Miss.BUSY] == 1
        assert consume(held) == [entry.payload for entry in entries[:2]]
        assert consume(store.get_many(keys(entries[2:3]), soon())) == [entries[2].payload]
        assert store._fetcher.budget.taken == 0


def test_what_was_read_before_its_erasure_is_not_written_again(weed: WeedCluster) -> None:
    """L25: a pin has the record in hand when its tenant is erased; a read that began before shows nothing either."""
    with node(weed, "pinrace", DictIndex()) as store:
        entries = prefix("a", 3)
        durable(store, entries)
        read, erased = store._reader.read, []

        def read_then_erased(row: IndexRow, deadline: float) -> ReadResult:
            result = read(row, deadline)
            if not erased:
                erased.append(store.drop_tenant(TENANT))
            return result

        store._reader.read = read_then_erased  # type: ignore[method-assign]
        assert store.pin(keys(entries)[:1]) == 0
        assert store.flush(60)
        assert not any(store.lookup(keys(entries), soon()))
        erased.clear()
        durable(store, prefix("b", 1, snapshot=0))
        assert consume(store.get_many(keys(prefix("b", 1, snapshot=0)), soon())) == [Miss.DROPPED]
        assert store.integrity() == ()
