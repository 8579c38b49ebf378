"""The cache calls over a real host tier and a real store on disk, without a worker around them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from prometheus_client import generate_latest

from headrace.kvcache.cache_events import Tier
from headrace.kvcache.entries import EntryInfo, EntryKind, RetentionClass, payload_digest
from headrace.kvcache.host.arena import arena_shape
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.host.types import HostStats
from headrace.kvcache.keys import Key
from headrace.kvcache.memory import buffer_of, host_slabs
from headrace.kvcache.store.base import PutEntry, Store
from headrace.kvcache.store.open import StoreSettings, open_store
from headrace.services.runtime.cache_control import ProcessCaches
from headrace.services.runtime.cache_metrics import add_cache_metrics
from headrace.services.runtime.cache_operations import CacheControls, TierTokens
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.control import ControlServicer, Inspection
from headrace.services.runtime.errors import FailedPrecondition, InvalidArgument, Unimplemented, from_rpc_error
from headrace.services.runtime.health import Health
from headrace.services.runtime.intake import Intake
from headrace.services.runtime.lives import Lives
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.registry.base import Replica, Role
from headrace.services.runtime.server import ServiceServer, open_channel
from headrace.services.runtime.settings import ListenSettings, RpcSettings
from headrace.v1 import control_pb2, control_pb2_grpc

NAMESPACES = (b"\x01" * 32, b"\x02" * 32)
TENANTS = (b"\x0a" * 16, b"\x0b" * 16)
BYTES = 1000
WAIT_S = 60.0


def key(name: str) -> Key:
    return hashlib.sha256(name.encode()).digest()


def entry(name: str, *, namespace: int = 0, tenant: int = 0) -> tuple[EntryInfo, bytes]:
    payload = (key(name) * (BYTES // 32 + 1))[:BYTES]
    info = EntryInfo(
        key=key(name),
        kind=EntryKind.BLOCK,
        namespace=NAMESPACES[namespace],
        parent=key("root"),
        tokens=128,
        length=BYTES,
        digest=payload_digest(payload),
        retention=RetentionClass.CHAT,
        tenant_tag=TENANTS[tenant],
    )
    return info, payload


class FakeDevice:
    """A device pool that holds some keys."""

    def __init__(self, *names: str) -> None:
        self.held = {key(name) for name in names}

    async def stats(self) -> control_pb2.TierStats:
        return control_pb2.TierStats(tier=control_pb2.CACHE_TIER_DEVICE, blocks=len(self.held))

    async def forget(self) -> tuple[int, int]:
        count, self.held = len(self.held), set()
        return count, 0

    async def find(self, blocks: Sequence[Key], snapshots: Sequence[Key]) -> tuple[Sequence[bool], Sequence[bool]]:
        return [one in self.held for one in blocks], [False for _ in snapshots]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(StoreSettings(f"file://{tmp_path}/store"))
    yield opened
    opened.close()


def put(store: Store, *names: str, **where: int) -> None:
    ticket = store.put_many([PutEntry(*entry(name, **where)) for name in names])
    assert all(ticket.durable.result(WAIT_S))


def host_with(*names: str, tenant: int = 0) -> HostTier:
    shape = arena_shape(4 * 8192, BYTES, 4100)
    host = HostTier(buffer_of(host_slabs(shape.slabs, shape.slab_bytes)), shape)
    for name in names:
        assert host.put(*entry(name, tenant=tenant))
    return host


@asynccontextmanager
async def served(controls: CacheControls | None) -> AsyncIterator[control_pb2_grpc.ControlServiceAsyncStub]:
    health = Health()
    server = ServiceServer(ListenSettings(), RpcSettings(), Metrics(), health)

    async def inspect(check: bool) -> Inspection:
        return Inspection(control_pb2.Conservation())

    control = ControlServicer(
        replica=lambda: Replica("w", "1" * 32, Role.PREFILL, "local", "host", "127.0.0.1:1"),
        health=health,
        inspect=inspect,
        intake=Intake(server, health, lambda: 0, SystemClock()),
        clock=SystemClock(),
        lives=Lives(),
        caches=None if controls is None else ProcessCaches(controls),
    )
    server.add(
        control_pb2_grpc.add_ControlServiceServicer_to_server,
        control,
        control_pb2.DESCRIPTOR.services_by_name["ControlService"],
    )
    await server.start()
    channel = open_channel(server.address, RpcSettings())
    try:
        yield control_pb2_grpc.ControlServiceStub(channel)
    finally:
        await channel.close()
        await server.stop()


async def test_stats_tell_every_tier(store: Store) -> None:
    put(store, "a", "b", "c")
    tokens = {Tier.STORE: TierTokens(256, 512)}
    async with served(CacheControls(FakeDevice("a"), host_with("a", "b"), store, lambda: tokens)) as stub:
        response = await stub.CacheStats(control_pb2.CacheStatsRequest(), timeout=WAIT_S)
    blocks = {tier.tier: tier.blocks for tier in response.tiers}
    assert blocks == {
        control_pb2.CACHE_TIER_DEVICE: 1,
        control_pb2.CACHE_TIER_HOST: 2,
        control_pb2.CACHE_TIER_STORE: 3,
    }
    of_store = response.tiers[2]
    assert (of_store.bytes, of_store.written_bytes) == (3 * BYTES, 3 * BYTES)
    assert of_store.disk_bytes > of_store.bytes
    assert (of_store.hit_tokens, of_store.lookup_tokens) == (256, 512)


async def test_find_tells_per_block_which_tier_has_it(store: Store) -> None:
    put(store, "a", "b")
    async with served(CacheControls(FakeDevice("a"), host_with("a", "c"), store)) as stub:
        keys = control_pb2.CacheKeys(blocks=[key(name) for name in "abcd"], snapshots=[key(name) for name in "wxyz"])
        response = await stub.FindCache(control_pb2.FindCacheRequest(keys=keys), timeout=WAIT_S)
    tiers = [[Tier(place.tier) for place in block.places] for block in response.blocks]
    assert tiers == [[Tier.DEVICE, Tier.HOST, Tier.STORE], [Tier.STORE], [Tier.HOST], []]
    assert not any(block.snapshot_places for block in response.blocks)
    stored = response.blocks[1].places[0]
    assert stored.retention == "chat"
    assert stored.bucket.startswith(NAMESPACES[0].hex())
    assert stored.expires_unix_ms > 0


async def test_a_pin_keeps_what_is_usable_and_says_so(store: Store) -> None:
    """L4: blocks from the first on; with snapshots, up to the last one that stands on whole blocks."""
    put(store, "a", "b", "d")
    keys = control_pb2.CacheKeys(blocks=[key(name) for name in "abcd"])
    async with served(CacheControls(store=store)) as stub:
        plain = await stub.PinCache(control_pb2.PinCacheRequest(keys=keys))
        assert (plain.asked, plain.pinned, plain.usable_blocks, plain.needs_snapshots) == (4, 2, 2, False)
        (d,) = store.find([key("d")], time.monotonic() + 60)
        assert d is not None
        assert d.retention is not RetentionClass.PINNED, "behind a gap: of no use"


async def test_a_pin_without_a_snapshot_keeps_nothing(store: Store) -> None:
    put(store, "a", "b", "c")
    snapshots = [key(f"snapshot of {name}") for name in "abc"]
    keys = control_pb2.CacheKeys(blocks=[key(name) for name in "abc"], snapshots=snapshots)
    async with served(CacheControls(store=store)) as stub:
        none = await stub.PinCache(control_pb2.PinCacheRequest(keys=keys))
        assert (none.asked, none.pinned, none.usable_blocks, none.needs_snapshots) == (6, 0, 0, True)
        put(store, "snapshot of b")
        some = await stub.PinCache(control_pb2.PinCacheRequest(keys=keys))
        assert (some.pinned, some.usable_blocks) == (3, 2)
        again = await stub.PinCache(control_pb2.PinCacheRequest(keys=keys))
        assert (again.pinned, again.usable_blocks) == (3, 2), "a second pin changes nothing"


async def test_a_tenants_entries_leave_every_tier_and_no_others_do(store: Store) -> None:
    """L25: erasure; the device pool, which knows no tenants, is emptied."""
    put(store, "a", "b")
    put(store, "other", tenant=1)
    host, device = host_with("a"), FakeDevice("a", "other")
    assert host.put(*entry("other", tenant=1))
    async with served(CacheControls(device, host, store)) as stub:
        response = await stub.ClearCache(control_pb2.ClearCacheRequest(tenant_tag=TENANTS[0]), timeout=WAIT_S)
    dropped = {Tier(drop.tier): drop.blocks for drop in response.drops}
    assert dropped == {Tier.STORE: 2, Tier.HOST: 1, Tier.DEVICE: 2}
    assert response.blocks == 5
    assert store.lookup([key("a"), key("other")], time.monotonic() + WAIT_S) == [False, True]
    assert host.lookup([key("a"), key("other")], time.monotonic() + WAIT_S) == [False, True]
    assert not device.held


async def test_scopes_and_tiers(store: Store) -> None:
    put(store, "a")
    put(store, "b", "c", namespace=1)
    host, device = host_with("h"), FakeDevice("d")
    async with served(CacheControls(device, host, store)) as stub:
        clear = control_pb2.ClearCacheRequest(namespace=NAMESPACES[1], tiers=[control_pb2.CACHE_TIER_STORE])
        assert (await stub.ClearCache(clear, timeout=WAIT_S)).blocks == 2
        assert device.held
        assert host.stats().blocks == 1
        everything = await stub.ClearCache(control_pb2.ClearCacheRequest(everything=True), timeout=WAIT_S)
        assert {Tier(drop.tier): drop.blocks for drop in everything.drops} == {
            Tier.STORE: 1,
            Tier.HOST: 1,
            Tier.DEVICE: 1,
        }
        left = await stub.CacheStats(control_pb2.CacheStatsRequest(), timeout=WAIT_S)
        assert [tier.blocks for tier in left.tiers] == [0, 0, 0]


async def test_verify_and_collect(store: Store) -> None:
    put(store, *"abcdef")
    async with served(CacheControls(store=store)) as stub:
        progress = [one async for one in stub.VerifyCache(control_pb2.VerifyCacheRequest(), timeout=WAIT_S)]
        assert [one.done for one in progress] == [False] * (len(progress) - 1) + [True]
        assert progress[-1].checked == 6
        assert not progress[-1].bad
        await stub.CollectCache(control_pb2.CollectCacheRequest(), timeout=WAIT_S)
        assert all(store.lookup([key(name) for name in "abcdef"], time.monotonic() + WAIT_S))


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (control_pb2.ClearCacheRequest(), "say what to drop"),
        (control_pb2.ClearCacheRequest(everything=False), "say what to drop"),
        (control_pb2.ClearCacheRequest(namespace=b"short"), "32 bytes"),
        (control_pb2.ClearCacheRequest(tenant_tag=b"short"), "16 bytes"),
        (control_pb2.ClearCacheRequest(tenant="acme"), "router"),
        (control_pb2.ClearCacheRequest(everything=True, tiers=[7]), "no cache tier"),  # type: ignore[list-item]
    ],
)
async def test_a_wrong_scope_drops_nothing(request_: control_pb2.ClearCacheRequest, problem: str) -> None:
    device = FakeDevice("a")
    async with served(CacheControls(device)) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=problem) as caught:
            await stub.ClearCache(request_, timeout=WAIT_S)
        assert isinstance(from_rpc_error(caught.value), InvalidArgument)
    assert device.held


async def test_what_a_process_has_not_is_said() -> None:
    async with served(None) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.CacheStats(control_pb2.CacheStatsRequest(), timeout=WAIT_S)
        assert isinstance(from_rpc_error(caught.value), Unimplemented)
    async with served(CacheControls(FakeDevice())) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=r"cache\.store") as caught:
            await stub.CollectCache(control_pb2.CollectCacheRequest(), timeout=WAIT_S)
        assert isinstance(from_rpc_error(caught.value), FailedPrecondition)
        keys = control_pb2.CacheKeys(blocks=[b"short"])
        with pytest.raises(grpc.aio.AioRpcError, match="32 bytes"):
            await stub.FindCache(control_pb2.FindCacheRequest(keys=keys), timeout=WAIT_S)


async def test_the_metrics_page_tells_what_tiers_hold(store: Store) -> None:
    """One question per tier and scrape, however many series there are."""
    put(store, "a", "b")
    host = host_with("a", "b", "c")
    assert [type(got).__name__ for got in host.get_many([key("a"), key("absent")], time.monotonic() + WAIT_S)] == [
        "Loaded",
        "Miss",
    ]
    metrics, asked = Metrics(), [0]
    real = host.stats

    def counted() -> HostStats:
        asked[0] += 1
        return real()

    host.stats = counted  # type: ignore[method-assign]
    add_cache_metrics(metrics, CacheControls(host=host, store=store), clock=lambda: 0.0)
    page = generate_latest(metrics.registry).decode()
    assert 'headrace_cache_entries{kind="blocks",tier="store"} 2.0' in page
    assert 'headrace_cache_entries{kind="blocks",tier="host"} 3.0' in page
    assert 'headrace_cache_hits{tier="host"} 1.0' in page
    assert 'headrace_cache_misses{cause="absent",tier="host"} 1.0' in page
    assert "headrace_store_disk_bytes " in page
    assert asked == [1]
