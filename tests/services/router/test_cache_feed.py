"""The router's feed against the workers' own event service, over real gRPC (L6, L14, L24)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from headrace.kvcache.cache_events import BucketDropped, Cleared, Removed, Stored, Tier
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.event_log import EventLog, Source
from headrace.kvcache.keys import Key, block_keys
from headrace.router.index.base import HolderTier
from headrace.router.index.index import BlockIndex
from headrace.router.index.store_view import StoreView
from headrace.services.router import cache_feed
from headrace.services.router.cache_feed import CacheFeed
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.health import Health
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.server import ServiceServer, open_channel
from headrace.services.runtime.settings import ListenSettings, RpcSettings
from headrace.services.worker.events_service import add_event_service
from headrace.v1 import common_pb2

PATIENCE_S = 60.0
KEYS = block_keys(bytes(32), list(range(64)), 4)
RPC = RpcSettings()


def stored(*keys: Key, tier: Tier = Tier.DEVICE) -> Stored:
    return Stored(EntryKind.BLOCK, tier, keys, None, 4 * len(keys), 10)


class Worker:
    """A process with events, and one like it afterwards."""

    def __init__(self, kept_keys: int = 1000) -> None:
        self.kept_keys = kept_keys
        self.server: ServiceServer | None = None

    async def live(self, incarnation: str, port: int = 0) -> common_pb2.PeerId:
        self.events = EventLog(Source("w", incarnation), 4, kept_keys=self.kept_keys)
        self.store = EventLog(Source("w", f"store of {incarnation}"), 4, contents=lambda: ())
        self.server = ServiceServer(ListenSettings(port=port), RPC, Metrics(), Health())
        self.servicer = add_event_service(self.server, self.events, self.store)
        await self.server.start()
        return common_pb2.PeerId(replica_id="w", incarnation=incarnation)

    async def die(self) -> None:
        assert self.server is not None
        await self.server.stop()


@asynccontextmanager
async def following(
    worker: Worker, peer: common_pb2.PeerId
) -> AsyncIterator[tuple[CacheFeed, BlockIndex, StoreView, grpc.aio.Channel]]:
    index, view = BlockIndex(1 << 20), StoreView(100, 60.0, 60.0)
    feed = CacheFeed(index, view, SystemClock())
    assert worker.server is not None
    channel = open_channel(worker.server.address, RPC)
    feed.join(peer, channel, [3])
    try:
        yield feed, index, view, channel
    finally:
        await feed.close()
        await channel.close()
        await worker.die()


async def until(true: Callable[[], bool]) -> None:
    """Wait for news to come through, boundedly."""
    for _ in range(int(PATIENCE_S / 0.01)):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never became true")


async def test_follows_events_from_the_first_on() -> None:
    """L24: a worker that keeps all its events needs no snapshot."""
    worker = Worker()
    peer = await worker.live("a")
    worker.events.append(stored(*KEYS[:3]))
    async with following(worker, peer) as (feed, index, _, _):
        await until(lambda: index.entries == 3)
        worker.events.append(stored(KEYS[0], tier=Tier.HOST))
        worker.events.append(Removed(EntryKind.BLOCK, Tier.DEVICE, (KEYS[1],)))
        await until(lambda: index.holders(KEYS[1]) == {})
        assert index.holders(KEYS[0]) == {3: HolderTier.DEVICE | HolderTier.HOST}
        worker.events.append(Cleared(Tier.DEVICE))
        await until(lambda: index.entries == 1)
        assert (feed.counts().applied, feed.counts().snapshots) == (4, 0)


async def test_takes_a_snapshot_over_a_gap() -> None:
    """L24: what is no longer kept is in the snapshot, and events behind its watermark follow."""
    worker = Worker(kept_keys=2)
    peer = await worker.live("a")
    for key in KEYS[:8]:
        worker.events.append(stored(key))
    async with following(worker, peer) as (feed, index, _, _):
        await until(lambda: index.entries == 8)
        worker.events.append(stored(KEYS[9]))
        await until(lambda: index.entries == 9)
        assert (feed.counts().gaps, feed.counts().snapshots, feed.lost) == (1, 1, 0)


async def test_a_worker_that_leaves_takes_its_part_along() -> None:
    """L14, L11: at once, and its task ends; the next life is followed from its own beginning."""
    worker = Worker()
    peer = await worker.live("a")
    async with following(worker, peer) as (feed, index, _, channel):
        worker.events.append(stored(*KEYS[:5]))
        await until(lambda: index.entries == 5)
        feed.leave("a")
        assert (index.entries, feed.sources) == (0, 0)
        assert feed.counts().applied == 1
        assert worker.server is not None
        port = int(worker.server.address.rpartition(":")[2])
        await worker.die()
        peer = await worker.live("b", port)
        worker.events.append(stored(*KEYS[5:7]))
        feed.join(peer, channel, [0])
        await until(lambda: index.holders(KEYS[5]) == {0: HolderTier.DEVICE})
        assert index.entries == 2


async def test_another_life_at_the_same_address_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """L14: until the registry says so, a process with another incarnation is not the worker."""
    monkeypatch.setattr(cache_feed, "FIRST_PAUSE_S", 0.01)
    worker = Worker()
    await worker.live("b")
    worker.events.append(stored(*KEYS[:5]))
    async with following(worker, common_pb2.PeerId(replica_id="w", incarnation="a")) as (feed, index, _, _):
        await until(lambda: feed.failures["WRONG_SOURCE"] > 1)
        assert index.entries == 0


async def test_a_broken_stream_goes_on_where_it_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """L6, L24: the position outlives the stream; nothing is told twice, and no snapshot is taken."""
    monkeypatch.setattr(cache_feed, "FIRST_PAUSE_S", 0.01)
    worker = Worker()
    peer = await worker.live("a")
    worker.events.append(stored(*KEYS[:2]))
    async with following(worker, peer) as (feed, index, _, _):
        await until(lambda: index.entries == 2)
        assert worker.server is not None
        port, events = int(worker.server.address.rpartition(":")[2]), worker.events
        await worker.die()
        events.append(stored(KEYS[4]))
        worker.server = ServiceServer(ListenSettings(port=port), RPC, Metrics(), Health())
        add_event_service(worker.server, events)
        await worker.server.start()
        await until(lambda: index.entries == 3)
        assert (feed.counts().repeated, feed.counts().snapshots) == (0, 0)
        assert sum(feed.failures.values()) >= 1


async def test_a_suspected_worker_is_asked_for_everything() -> None:
    """L24: an index that proved wrong is corrected, but one worker is not asked again and again."""
    worker = Worker()
    peer = await worker.live("a")
    async with following(worker, peer) as (feed, index, _, _):
        worker.events.append(stored(*KEYS[:2]))
        await until(lambda: index.entries == 2)
        index.stored(3, HolderTier.DEVICE, KEYS[4:6])  # wrong
        assert feed.suspect("a")
        await until(lambda: index.entries == 2 and feed.lost == 0)
        assert not feed.suspect("a")
        assert feed.counts().snapshots == 1


async def test_a_removal_explains_a_hint_that_was_wrong() -> None:
    """A worker that has told of an eviction is not suspected."""
    worker = Worker()
    peer = await worker.live("a")
    async with following(worker, peer) as (feed, index, _, _):
        worker.events.append(stored(*KEYS[:2]))
        await until(lambda: index.entries == 2)
        told, kept = feed.expect("a", 2, KEYS[1:2]), feed.expect("a", 1, KEYS[:1])
        assert told is not None
        assert kept is not None
        worker.events.append(Removed(EntryKind.BLOCK, Tier.DEVICE, (KEYS[1],)))
        worker.events.append(stored(KEYS[1]))
        await until(lambda: told.withdrawn)
        assert not kept.withdrawn
        feed.settle(told)
        feed.settle(told)
        feed.settle(kept)


async def test_what_writers_of_the_store_say_reaches_the_view() -> None:
    """L24: what is written becomes known, what is removed unknown; a dropped bucket, whose keys nobody tells, makes the
    view forget."""
    worker = Worker()
    peer = await worker.live("a")
    async with following(worker, peer) as (_, index, view, _):
        now = SystemClock().monotonic
        worker.store.append(stored(*KEYS[:3], tier=Tier.STORE))
        worker.store.append(Removed(EntryKind.BLOCK, Tier.STORE, (KEYS[1],)))
        await until(lambda: view.known(KEYS[1], now()) is False)
        assert view.known(KEYS[0], now()) is True
        worker.store.append(BucketDropped("bucket"))
        await until(lambda: len(view) == 0)
        assert index.entries == 0
