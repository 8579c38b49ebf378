"""What every store promises (kvcache/store/base.py). An engine joins by a class in its own test file:

    class TestSegments(StoreContract):
        @pytest.fixture
        def engine(self, tmp_path): ...   # an OpenStore

Operations that an engine's capabilities leave out must raise CapabilityMissing; the suite asks that too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import pytest

from headrace.kvcache.cache_events import CacheChange, EventSink, NamespaceDropped, Removed, Stored, Tier, ignore_events
from headrace.kvcache.entries import EntryKind, Loaded, Miss, RetentionClass
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import CapabilityMissing, Store, WallClock
from tests.kvcache.store.entries import (
    NAMESPACE,
    OTHER_NAMESPACE,
    OTHER_TENANT,
    TENANT,
    FakeWall,
    block,
    consume,
    key_of,
    keys,
    prefix,
    soon,
)


class OpenStore(Protocol):
    """Opens the same store each time it is called; what was durable is there again. `queue_bytes` bounds what is
    accepted and not yet written."""

    def __call__(
        self,
        *,
        events: EventSink = ignore_events,
        wall: WallClock = ...,
        queue_bytes: int = 64 << 20,
    ) -> Store: ...


@contextmanager
def closing(store: Store) -> Iterator[Store]:
    try:
        yield store
    finally:
        store.close()


def durable(store: Store, entries: list[object] | object) -> None:
    """Put entries and see all of them durable."""
    ticket = store.put_many(entries)  # type: ignore[arg-type]
    assert store.flush(20.0)
    assert all(ticket.accepted)
    assert all(ticket.durable.result(timeout=60.0))


class StoreContract:
    """Subclass per engine; `engine` opens it."""

    @pytest.fixture
    def engine(self) -> OpenStore:
        raise NotImplementedError("the engine's test class gives this fixture")

    @pytest.fixture
    def store(self, engine: OpenStore) -> Iterator[Store]:
        with closing(engine()) as opened:
            yield opened

    # Writing and reading

    def test_what_is_durable_is_read_back(self, store: Store) -> None:
        """L3: the payloads, under their keys, with everything their writer said of them."""
        odd = [block("odd", 0, length=1), block("page", 0, length=4096), block("b", 0, length=4097)]
        entries = [*prefix("a", 5), *odd]
        durable(store, entries)
        results = store.get_many(keys(entries), soon())
        assert [result.info for result in results if isinstance(result, Loaded)] == [entry.info for entry in entries]
        assert all(result.payload.readonly for result in results if isinstance(result, Loaded))
        assert consume(results) == [entry.payload for entry in entries]

    def test_results_come_in_the_order_asked(self, store: Store) -> None:
        entries = prefix("a", 6)
        durable(store, entries)
        asked = [entries[4], entries[0], entries[6], entries[2], entries[4]]
        unknown = key_of("never stored")
        got = consume(store.get_many([*keys(asked), unknown], soon()))
        assert got == [*(entry.payload for entry in asked), Miss.ABSENT]

    def test_survives_closing(self, engine: OpenStore) -> None:
        entries = prefix("a", 4)
        with closing(engine()) as store:
            assert all(store.put_many(entries).accepted)
        with closing(engine()) as store:
            assert list(store.lookup(keys(entries), soon())) == [True] * len(entries)
            assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]

    def test_close_makes_durable_what_was_accepted(self, engine: OpenStore) -> None:
        store = engine()
        ticket = store.put_many(prefix("a", 3))
        store.close()
        store.close()
        assert ticket.durable.result(timeout=0) == (True,) * 4

    def test_the_payload_is_copied(self, store: Store) -> None:
        entry = block("a", 0)
        memory = bytearray(entry.payload)
        ticket = store.put_many([type(entry)(entry.info, memoryview(memory))])
        memory[:] = bytes(len(memory))
        assert ticket.durable.result(timeout=60.0) == (True,)
        assert consume(store.get_many([entry.info.key], soon())) == [entry.payload]

    def test_an_entry_that_is_there_is_not_taken_again(self, store: Store) -> None:
        entries = prefix("a", 3)
        durable(store, entries)
        ticket = store.put_many([*entries, block("b", 0)])
        assert ticket.accepted == (False,) * 4 + (True,)
        assert ticket.durable.result(timeout=60.0) == (False,) * 4 + (True,)
        assert store.stats().refused_known == 4

    def test_an_entry_in_flight_is_not_taken_again(self, store: Store) -> None:
        """One of many who put the same at once is taken, in one call and over several."""
        entry = block("a", 0)
        tickets = [store.put_many([entry, entry]) for _ in range(3)]
        assert sum(sum(ticket.accepted) for ticket in tickets) == 1
        assert store.flush(20.0)
        assert store.stats().blocks == 1

    def test_payload_and_length_must_agree(self, store: Store) -> None:
        entry = block("a", 0)
        with pytest.raises(ValueError, match="payload"):
            store.put_many([type(entry)(entry.info, b"short")])

    def test_nothing_asked_is_nothing_done(self, store: Store) -> None:
        assert store.put_many([]).durable.result(timeout=60.0) == ()
        assert list(store.lookup([], soon())) == []
        assert list(store.get_many([], soon())) == []
        assert list(store.find([], soon())) == []
        assert store.flush(5.0)

    def test_a_full_queue_refuses_suffixes(self, engine: OpenStore) -> None:
        """L12: bounded, and told at once; what is refused takes everything behind it along."""
        with closing(engine(queue_bytes=1 << 20)) as store:
            entries = prefix("a", 64, length=100_000, snapshot=10_000)
            ticket = store.put_many(entries)
            taken = sum(ticket.accepted)
            assert 1 <= taken < len(entries)
            assert ticket.accepted == (True,) * taken + (False,) * (len(entries) - taken)
            assert store.flush(20.0)
            assert ticket.durable.result(timeout=60.0) == ticket.accepted
            assert store.stats().refused_full == len(entries) - taken
            assert all(store.put_many(entries[taken : taken + 1]).accepted)

    # Deadlines and buffers

    def test_a_deadline_that_has_passed_is_a_miss(self, store: Store) -> None:
        """L6, L17: answered at once, counted, and nothing is lost by it."""
        entries = prefix("a", 2)
        durable(store, entries)
        results = store.get_many(keys(entries), soon(-1.0))
        assert all(isinstance(result, Miss) for result in results)
        assert store.stats().misses
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]

    def test_buffers_come_back(self, store: Store) -> None:
        """L11: reading more than all buffers hold, in turn, never runs out of them."""
        entries = prefix("a", 4, length=200_000)
        durable(store, entries)
        for _ in range(100):
            assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]

    def test_release_twice_is_harmless(self, store: Store) -> None:
        """L7: a payload that is held stays, however often another one was released."""
        entries = prefix("a", 2, snapshot=0)
        durable(store, entries)
        first, second = store.get_many(keys(entries), soon())
        assert isinstance(first, Loaded)
        assert isinstance(second, Loaded)
        first.release()
        first.release()
        others = store.get_many([entries[0].info.key] * 3, soon())
        assert bytes(second.payload) == entries[1].payload
        assert consume(others) == [entries[0].payload] * 3
        second.release()

    def test_many_threads(self, store: Store) -> None:
        """Writers and readers at once; every answer is the right payload or a miss."""
        chains = [prefix(f"chain {number}", 6) for number in range(4)]
        wrong: list[object] = []

        def work(own: int) -> None:
            for turn in range(4):
                chain = chains[(own + turn) % len(chains)]
                store.put_many(chain)
                got = consume(store.get_many(keys(chain), soon()))
                wrong.extend(g for g, e in zip(got, chain, strict=True) if g not in (e.payload, Miss.ABSENT))

        threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert store.flush(20.0)
        for chain in chains:
            assert consume(store.get_many(keys(chain), soon())) == [entry.payload for entry in chain]

    # Retention

    def test_expired_entries_are_misses(self, engine: OpenStore) -> None:
        wall = FakeWall()
        with closing(engine(wall=wall)) as store:
            agent = prefix("a", 2, retention=RetentionClass.AGENT)
            chat = prefix("b", 2, retention=RetentionClass.CHAT)
            durable(store, agent + chat)
            found = [entry for entry in store.find(keys(agent + chat), soon()) if entry is not None]
            assert len(found) == len(agent + chat)
            assert all(entry.expires_at >= wall.now + 3 * 86_400 for entry in found)
            wall.now += 4 * 86_400
            assert list(store.lookup(keys(agent), soon())) == [False] * len(agent)
            assert all(isinstance(got, Miss) for got in store.get_many(keys(agent), soon()))
            assert consume(store.get_many(keys(chat), soon())) == [entry.payload for entry in chat]

    def test_collecting_expires_whole_buckets(self, engine: OpenStore) -> None:
        wall = FakeWall()
        with closing(engine(wall=wall)) as store:
            agent = prefix("a", 2, retention=RetentionClass.AGENT)
            chat = prefix("b", 2, retention=RetentionClass.CHAT)
            durable(store, agent + chat)
            store.collect()
            assert store.stats().blocks == 4
        # A new opening: its clock has no history, so four days on are no jump.
        wall.now += 4 * 86_400
        with closing(engine(wall=wall)) as store:
            store.collect()
            assert store.stats().blocks == 2
            assert consume(store.get_many(keys(chat), soon())) == [entry.payload for entry in chat]

    def test_a_hit_in_the_second_half_of_a_life_prolongs_it(self, engine: OpenStore) -> None:
        wall = FakeWall()
        with closing(engine(wall=wall)) as store:
            if not store.capabilities.refresh:
                pytest.skip("this engine does not refresh")
            entries = prefix("a", 3)
            durable(store, entries)
            before = [entry.expires_at for entry in store.find(keys(entries), soon()) if entry is not None]
            wall.now += 2 * 86_400
            store.touch(keys(entries), RetentionClass.CHAT, TENANT)
            assert store.flush(20.0)
            assert [e.expires_at for e in store.find(keys(entries), soon()) if e is not None] == before
            wall.now += 3 * 86_400
            store.touch(keys(entries), RetentionClass.CHAT, TENANT)
            assert store.flush(20.0)
            after = [entry.expires_at for entry in store.find(keys(entries), soon()) if entry is not None]
            assert all(new >= wall.now + 7 * 86_400 for new in after)
            assert len(after) == len(entries)
            wall.now += 6 * 86_400
            assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
            assert store.stats().blocks == 3

    def test_a_longer_class_takes_an_entry_over(self, engine: OpenStore) -> None:
        with closing(engine()) as store:
            if not store.capabilities.refresh:
                pytest.skip("this engine does not refresh")
            entries = prefix("a", 2, retention=RetentionClass.AGENT)
            durable(store, entries)
            store.touch(keys(entries), RetentionClass.CHAT, TENANT)
            assert store.flush(20.0)
            store.touch(keys(entries), RetentionClass.AGENT, TENANT)
            assert store.flush(20.0)
            found = store.find(keys(entries), soon())
            assert [entry.retention for entry in found if entry is not None] == [RetentionClass.CHAT] * 3

    def test_pinned_entries_stay(self, engine: OpenStore) -> None:
        wall = FakeWall()
        with closing(engine(wall=wall)) as store:
            entries = prefix("a", 2)
            durable(store, entries)
            if not store.capabilities.pin:
                with pytest.raises(CapabilityMissing):
                    store.pin(keys(entries))
                return
            assert store.pin([*keys(entries), key_of("never stored")]) == 3
            assert [e.expires_at for e in store.find(keys(entries), soon()) if e is not None] == [math.inf] * 3
            wall.now += 30 * 86_400
            assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]

    # Erasing

    def test_a_dropped_tenant_is_unreadable(self, engine: OpenStore) -> None:
        """L25: at once, and after the store was opened again; other tenants stay, and the tenant may come back."""
        mine, theirs = prefix("a", 3), prefix("b", 3, tenant=OTHER_TENANT)
        with closing(engine()) as store:
            durable(store, mine + theirs)
            self._drop(store, store.capabilities.drop_tenant, lambda: store.drop_tenant(TENANT))
            if not store.capabilities.drop_tenant:
                return
            assert list(store.lookup(keys(mine), soon())) == [False] * 4
            assert all(isinstance(got, Miss) for got in store.get_many(keys(mine), soon()))
            assert consume(store.get_many(keys(theirs), soon())) == [entry.payload for entry in theirs]
        with closing(engine()) as store:
            assert all(isinstance(got, Miss) for got in store.get_many(keys(mine), soon()))
            durable(store, mine)
            assert consume(store.get_many(keys(mine), soon())) == [entry.payload for entry in mine]

    def test_what_is_in_flight_is_dropped_with_its_tenant(self, store: Store) -> None:
        """L25: an entry accepted before the erasure is never readable after it."""
        if not store.capabilities.drop_tenant:
            pytest.skip("this engine cannot drop a tenant")
        mine = prefix("a", 20)
        store.put_many(mine)
        store.drop_tenant(TENANT)
        assert store.flush(20.0)
        assert all(isinstance(got, Miss) for got in store.get_many(keys(mine), soon()))

    def test_a_dropped_namespace_is_unreadable(self, engine: OpenStore) -> None:
        events: list[CacheChange] = []
        old, new = prefix("a", 3), prefix("b", 3, namespace=OTHER_NAMESPACE)
        with closing(engine(events=events.append)) as store:
            durable(store, old + new)
            self._drop(store, store.capabilities.drop_namespace, lambda: store.drop_namespace(NAMESPACE))
            if not store.capabilities.drop_namespace:
                return
            assert NamespaceDropped(NAMESPACE) in events
            assert all(isinstance(got, Miss) for got in store.get_many(keys(old), soon()))
            assert consume(store.get_many(keys(new), soon())) == [entry.payload for entry in new]
        with closing(engine()) as store:
            assert all(isinstance(got, Miss) for got in store.get_many(keys(old), soon()))
            durable(store, old)

    def test_a_dropped_bucket_is_gone(self, store: Store) -> None:
        agent, chat = prefix("a", 2, retention=RetentionClass.AGENT), prefix("b", 2)
        durable(store, agent + chat)
        entry = store.find([agent[0].info.key], soon())[0]
        assert entry is not None
        dropped = store.drop_bucket(entry.bucket)
        assert (dropped.blocks, dropped.snapshots) == (2, 1)
        assert all(isinstance(got, Miss) for got in store.get_many(keys(agent), soon()))
        assert consume(store.get_many(keys(chat), soon())) == [entry.payload for entry in chat]

    # Looking at it

    def test_scan_tells_everything(self, store: Store) -> None:
        entries = prefix("a", 3) + prefix("b", 2, tenant=OTHER_TENANT, namespace=OTHER_NAMESPACE)
        durable(store, entries)
        if not store.capabilities.scan:
            with pytest.raises(CapabilityMissing):
                list(store.scan())
            return
        found = {entry.info.key: entry for entry in store.scan()}
        assert {key: entry.info for key, entry in found.items()} == {e.info.key: e.info for e in entries}
        for entry in store.find(keys(entries), soon()):
            assert entry is not None
            assert found[entry.key].bucket == entry.bucket
            assert found[entry.key].expires_at == entry.expires_at

    def test_the_index_lists_what_can_be_found(self, engine: OpenStore) -> None:
        wall = FakeWall()
        with closing(engine(wall=wall)) as store:
            lasting = prefix("a", 3)
            durable(store, lasting + prefix("b", 2, retention=RetentionClass.AGENT))
            wall.now += 4 * 86_400
            listed = {entry.key: entry for entry in store.entries(soon())}
            assert listed.keys() == set(keys(lasting))
            assert list(listed.values()) == list(store.find(list(listed), soon()))

    def test_verify_finds_nothing_wrong(self, store: Store) -> None:
        entries = prefix("a", 3)
        durable(store, entries)
        done: list[int] = []
        report = store.verify(done.append)
        assert (report.checked, report.bad, report.missing_in_index, report.dangling) == (4, (), 0, 0)
        assert done[-1] == 4

    def test_stats_add_up(self, store: Store) -> None:
        entries = prefix("a", 3)
        durable(store, entries)
        consume(store.get_many([*keys(entries), key_of("never stored")], soon()))
        stats = store.stats()
        size = sum(entry.info.length for entry in entries)
        assert (stats.blocks, stats.snapshots, stats.payload_bytes) == (3, 1, size)
        assert (stats.hits, stats.read_bytes, stats.written_bytes) == (4, size, size)
        assert stats.misses[Miss.ABSENT] == 1
        assert (stats.queued_entries, stats.queued_bytes) == (0, 0)
        assert stats.disk_bytes >= size

    # Events

    def test_stored_is_said_of_durable_entries_only(self, engine: OpenStore) -> None:
        """L4: nothing is advertised before it is readable; chains are told with their parent."""
        told: list[Key] = []
        unreadable: list[Key] = []
        events: list[CacheChange] = []
        opened: list[Store] = []

        def sink(change: CacheChange) -> None:
            events.append(change)
            if isinstance(change, Stored):
                told.extend(change.keys)
                known = opened[0].lookup(change.keys, soon())
                unreadable.extend(key for key, there in zip(change.keys, known, strict=True) if not there)

        with closing(engine(events=sink)) as store:
            opened.append(store)
            entries = prefix("a", 4)
            durable(store, entries)
            assert sorted(told) == sorted(keys(entries))
            assert not unreadable
            blocks = [event for event in events if isinstance(event, Stored) and event.kind is EntryKind.BLOCK]
            assert blocks[0].parent == entries[0].info.parent
            assert blocks[-1].end_tokens == entries[3].info.tokens
            assert all(isinstance(event, Stored) and event.tier is Tier.STORE for event in events)

    def test_removed_is_said_when_entries_go(self, engine: OpenStore) -> None:
        events: list[CacheChange] = []
        with closing(engine(events=events.append)) as store:
            if not store.capabilities.drop_tenant:
                pytest.skip("this engine cannot drop a tenant")
            entries = prefix("a", 3)
            durable(store, entries)
            store.drop_tenant(TENANT)
            removed = [key for event in events if isinstance(event, Removed) for key in event.keys]
            assert sorted(removed) == sorted(keys(entries))

    @staticmethod
    def _drop(store: Store, able: bool, drop: Callable[[], object]) -> None:
        expected: AbstractContextManager[object] = pytest.raises(CapabilityMissing)
        if able:
            drop()
            return
        with expected:
            drop()
