"""Watch and Snapshot over real gRPC and real processes (L24, L14)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest

from headrace.kvcache.cache_events import Cleared, Removed, Stored, Tier
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.event_log import EventLog, HeldEntries, Source
from headrace.kvcache.keys import block_keys
from headrace.kvcache.tier.types import CacheScope
from headrace.services.runtime.errors import InvalidArgument, NotFound, from_rpc_error
from headrace.services.runtime.health import Health
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.server import ServiceServer, open_channel
from headrace.services.runtime.settings import ListenSettings
from headrace.services.worker import events_service
from headrace.services.worker.cache_wire import change_from_wire, stored_from_wire
from headrace.services.worker.events_service import EventServicer, add_event_service
from headrace.v1 import events_pb2, events_pb2_grpc
from tests.services.cluster import PATIENCE_S, RPC, Cluster
from tests.services.driver import ROOT, attached, make_request, prompt_of
from tests.services.tiny import BLOCK

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass
class Watcher:
    """A reader that applies what it is sent, and takes a snapshot on a gap."""

    channel: grpc.aio.Channel
    source: events_pb2.EventSource.ValueType = events_pb2.EVENT_SOURCE_WORKER
    held: HeldEntries = field(default_factory=lambda: HeldEntries(BLOCK))
    incarnation: str = ""
    position: int = 1
    gaps: int = 0

    async def snapshot(self) -> None:
        stub = events_pb2_grpc.EventServiceStub(self.channel)
        self.held = HeldEntries(BLOCK)
        last = False
        async for page in stub.Snapshot(events_pb2.SnapshotRequest(event_source=self.source), timeout=PATIENCE_S):
            assert not last
            for stored in page.entries:
                self.held.apply(stored_from_wire(stored))
            self.position, self.incarnation = page.watermark + 1, page.source.incarnation
            last = page.last
        assert last

    async def follow(self, until_sequence: int) -> None:
        """Read until this sequence is in."""
        stub = events_pb2_grpc.EventServiceStub(self.channel)
        request = events_pb2.EventServiceWatchRequest(
            incarnation=self.incarnation, from_sequence=self.position, event_source=self.source
        )
        call = stub.Watch(request, timeout=PATIENCE_S)
        async for message in call:
            self.incarnation = message.source.incarnation
            if message.gap:
                assert not message.events
                self.gaps += 1
                await self.snapshot()
            for event in message.events:
                if event.sequence < self.position:
                    continue  # the snapshot has it
                assert event.sequence == self.position
                change = change_from_wire(event)
                assert change is not None
                self.held.apply(change)
                self.position += 1
            if self.position > until_sequence:
                break
        call.cancel()


@asynccontextmanager
async def served(log: EventLog, store: EventLog | None = None) -> AsyncIterator[tuple[EventServicer, grpc.aio.Channel]]:
    server = ServiceServer(ListenSettings(), RPC, Metrics(), Health())
    servicer = add_event_service(server, log, store)
    await server.start()
    channel = open_channel(server.address, RPC)
    try:
        yield servicer, channel
    finally:
        await channel.close()
        await server.stop()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(*numbers: int, tier: Tier = Tier.DEVICE) -> Stored:
    return Stored(EntryKind.BLOCK, tier, tuple(map(key, numbers)), None, len(numbers) * BLOCK, 64)


async def test_a_slow_watcher_hears_of_a_gap_and_catches_up() -> None:
    """L24: a watcher takes no memory here; what it misses it gets from a snapshot."""
    log = EventLog(Source("w", "life"), BLOCK, kept_keys=4)
    async with served(log) as (servicer, channel):
        watcher = Watcher(channel)
        log.append(stored(1, 2))
        await watcher.follow(1)
        for number in range(3, 40):
            log.append(stored(number))
        log.append(Removed(EntryKind.BLOCK, Tier.DEVICE, (key(2), key(5))))
        await watcher.follow(log.last_sequence)
        assert watcher.gaps == 1
        assert watcher.held.keys(Tier.DEVICE, EntryKind.BLOCK) == {key(n) for n in (1, 3, 4, *range(6, 40))}
        log.append(Cleared(Tier.DEVICE))
        await watcher.follow(log.last_sequence)
        assert watcher.gaps == 1
        assert len(watcher.held) == 0
        async with asyncio.timeout(PATIENCE_S):
            while servicer.watchers:  # noqa: ASYNC110 - a call that ended leaves nothing
                await asyncio.sleep(0.01)


async def test_each_source_has_its_own_sequence() -> None:
    """A worker's death removes only what its own tiers held, so the store is a source of its own."""
    worker, store = EventLog(Source("w", "life"), BLOCK), EventLog(Source("store:w", "epoch"), BLOCK)
    async with served(worker, store) as (_, channel):
        worker.append(stored(1, tier=Tier.HOST))
        store.append(stored(2, tier=Tier.STORE))
        store.append(stored(3, tier=Tier.STORE))
        mine, shared = Watcher(channel), Watcher(channel, events_pb2.EVENT_SOURCE_STORE)
        await mine.follow(1)
        await shared.follow(2)
        assert (mine.incarnation, shared.incarnation) == ("life", "epoch")
        assert mine.held.keys(Tier.HOST, EntryKind.BLOCK) == {key(1)}
        assert shared.held.keys(Tier.STORE, EntryKind.BLOCK) == {key(2), key(3)}
        assert len(mine.held) == 1


async def test_a_snapshot_comes_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_service, "MESSAGE_KEYS", 3)
    log = EventLog(Source("w", "life"), BLOCK)
    for number in range(1, 21):
        log.append(stored(number))
    async with served(log) as (_, channel):
        watcher = Watcher(channel)
        await watcher.snapshot()
        assert watcher.position == 21
        assert watcher.held.keys(Tier.DEVICE, EntryKind.BLOCK) == {key(number) for number in range(1, 21)}


async def test_an_unknown_source_or_tier_is_refused() -> None:
    log = EventLog(Source("w", "life"), BLOCK)
    async with served(log) as (_, channel):
        stub = events_pb2_grpc.EventServiceStub(channel)
        watch = events_pb2.EventServiceWatchRequest(event_source=events_pb2.EVENT_SOURCE_STORE)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Watch(watch, timeout=PATIENCE_S)))
        assert isinstance(from_rpc_error(caught.value), NotFound)
        wrong = events_pb2.SnapshotRequest(tiers=[9])  # type: ignore[list-item]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Snapshot(wrong, timeout=PATIENCE_S)))
        assert isinstance(from_rpc_error(caught.value), InvalidArgument)


async def test_a_killed_worker_is_a_gap(v3_folder: Path, tmp_path: Path) -> None:
    """L14, L24: watch, kill, gap, snapshot; the watched state is the snapshot's, and the prompt's keys are in it."""
    async with Cluster(v3_folder, tmp_path, ttl_seconds=2.0) as cluster:
        await cluster.start_all("prefill", "decode")
        prefill, decode = cluster["prefill"], cluster["decode"]
        prompt = prompt_of("events", 5 * BLOCK + 3)
        async with attached(prefill, decode) as driver:
            answer = await driver.generate(make_request("events", prompt))
            assert answer.finished
        wanted = set(block_keys(ROOT, prompt, BLOCK))
        for worker in (prefill, decode):
            watched, listed = Watcher(worker.channel), Watcher(worker.channel)
            await listed.snapshot()
            await watched.follow(listed.position - 1)
            held = watched.held.keys(Tier.DEVICE, EntryKind.BLOCK)
            assert wanted <= held
            assert held == listed.held.keys(Tier.DEVICE, EntryKind.BLOCK)
            assert watched.gaps == 0
            assert watched.incarnation == worker.replica.incarnation

        last = Watcher(prefill.channel)
        await last.snapshot()
        await prefill.kill()
        await cluster.gone(prefill)
        again = await cluster.start("prefill")
        reader = Watcher(again.channel, incarnation=last.incarnation, position=last.position, held=last.held)
        async with attached(again, decode) as driver:
            await driver.generate(make_request("afterwards", prompt_of("afterwards", 2 * BLOCK)))
        listed = Watcher(again.channel)
        await listed.snapshot()
        await reader.follow(listed.position - 1)
        assert reader.gaps == 1
        assert reader.incarnation == again.replica.incarnation
        held = reader.held.keys(Tier.DEVICE, EntryKind.BLOCK)
        assert held == listed.held.keys(Tier.DEVICE, EntryKind.BLOCK)
        assert not held & wanted, "what the dead one held is gone"


async def test_a_store_outlives_its_writer(v3_folder: Path, tmp_path: Path) -> None:
    """L24, L14: the store is a source of its own; a writer's death removes nothing, and the next one's snapshot lists
    what is there, under a new epoch."""
    sets = (f"cache.store=file://{tmp_path / 'store'}", "cache.min_load_tokens=16")
    prompt = prompt_of("stored", 6 * BLOCK + 3)
    wanted = set(block_keys(ROOT, prompt, BLOCK))
    async with Cluster(v3_folder, tmp_path, ttl_seconds=2.0) as cluster:
        prefill, decode = await cluster.start("prefill", *sets), await cluster.start("decode")
        watcher = Watcher(prefill.channel, events_pb2.EVENT_SOURCE_STORE)
        async with attached(prefill, decode) as driver:
            await driver.generate(make_request("stored", prompt, cache=CacheScope(b"n" * 32, b"t" * 16)))
        while not wanted <= watcher.held.keys(Tier.STORE, EntryKind.BLOCK):
            await watcher.follow(watcher.position)  # until one event more
        assert watcher.gaps == 0
        assert watcher.incarnation != prefill.replica.incarnation
        await prefill.kill()
        await cluster.gone(prefill)
        again = await cluster.start("prefill", *sets)
        listed = Watcher(again.channel, events_pb2.EVENT_SOURCE_STORE)
        await listed.snapshot()
        assert wanted <= listed.held.keys(Tier.STORE, EntryKind.BLOCK)
        assert listed.incarnation != watcher.incarnation
