"""The router's cache calls over several workers, some of which fail: answers are merged, failures told beside them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.kvcache.keys import namespace
from headrace.services.router.caches import ClusterCaches
from headrace.services.router.settings import RouterSettings
from headrace.services.router.tenants import Tenants
from headrace.services.router.workers import ModelGroup
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.control import ControlServicer, Inspection
from headrace.services.runtime.errors import FailedPrecondition, HeadraceError, NotFound, PermissionDenied, Unavailable
from headrace.services.runtime.health import Health
from headrace.services.runtime.intake import Intake
from headrace.services.runtime.lives import Lives
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.registry.base import Replica, Role
from headrace.services.runtime.server import ServiceServer, open_channel
from headrace.services.runtime.settings import ListenSettings, RpcSettings
from headrace.v1 import common_pb2, control_pb2, control_pb2_grpc

GROUP = ModelGroup(b"m" * 32, b"l" * 32, b"r" * 32, 32, 512)
MODEL: Any = SimpleNamespace(window=16, text_digest=b"t" * 32)
SECRET = b"a secret of sixteen bytes at least"
DEVICE, HOST, STORE = control_pb2.CACHE_TIER_DEVICE, control_pb2.CACHE_TIER_HOST, control_pb2.CACHE_TIER_STORE


class FakeOperations:
    """One worker's answers; `fault` is raised by all of them."""

    def __init__(self, *tiers: int, fault: HeadraceError | None = None) -> None:
        self.tiers = tiers
        self.fault = fault
        self.asked: list[Any] = []
        self.sweeps = True
        self.store = ""
        self.blocks = 2
        self.left = 3
        self.snapshots = 1

    def _take(self, request: Any) -> None:
        self.asked.append(request)
        if self.fault is not None:
            raise self.fault

    async def stats(self, request: Any, metadata: Any) -> control_pb2.CacheStatsResponse:
        self._take(request)
        store = {"store": self.store, "sweeper": self.sweeps, "hits": 5, "misses": {"absent": 1}, "segments": 4}
        return control_pb2.CacheStatsResponse(
            tiers=[
                control_pb2.TierStats(tier=t, blocks=self.blocks, **(store if t == STORE else {}))  # type: ignore[arg-type]
                for t in self.tiers
            ]
        )

    async def clear(self, request: Any, metadata: Any) -> control_pb2.ClearCacheResponse:
        self._take(request)
        drops = [
            control_pb2.TierDrop(
                tier=t,  # type: ignore[arg-type]
                blocks=self.left,
                snapshots=self.snapshots,
                store=self.store if t == STORE else "",
            )
            for t in self.tiers
        ]
        return control_pb2.ClearCacheResponse(drops=drops)

    async def find(self, request: Any, metadata: Any) -> control_pb2.FindCacheResponse:
        self._take(request)
        places = [control_pb2.CachePlace(tier=t, bucket="b" if t == STORE else "") for t in self.tiers]  # type: ignore[arg-type]
        blocks = [control_pb2.FoundBlock(key=key, places=places) for key in request.keys.blocks]
        return control_pb2.FindCacheResponse(blocks=blocks)

    async def pin(self, request: Any, metadata: Any) -> control_pb2.PinCacheResponse:
        self._take(request)
        count = len(request.keys.blocks)
        return control_pb2.PinCacheResponse(pinned=count, asked=count, usable_blocks=count)

    async def verify(self, request: Any, metadata: Any) -> AsyncIterator[control_pb2.VerifyCacheResponse]:
        self._take(request)
        yield control_pb2.VerifyCacheResponse(checked=1, expected=2)
        yield control_pb2.VerifyCacheResponse(checked=2, expected=2, done=True)

    async def collect(self, request: Any, metadata: Any) -> control_pb2.CollectCacheResponse:
        self._take(request)
        if STORE not in self.tiers:
            raise FailedPrecondition("no store here")
        if self.sweeps:
            return control_pb2.CollectCacheResponse(freed_bytes=5)
        return control_pb2.CollectCacheResponse(refused="another process is the sweeper")


async def _nothing(check: bool = False) -> Inspection:
    return Inspection(control_pb2.Conservation())


@asynccontextmanager
async def worker(name: str, role: Role, operations: FakeOperations) -> AsyncIterator[Any]:
    health, clock = Health(), SystemClock()
    server = ServiceServer(ListenSettings(), RpcSettings(), Metrics(), health)
    replica = Replica(name, "1" * 32, role, "local", "host", "127.0.0.1:1")
    intake = Intake(server, health, lambda: 0, clock)
    control = ControlServicer(lambda: replica, health, _nothing, intake, clock, Lives(), caches=operations)
    server.add(
        control_pb2_grpc.add_ControlServiceServicer_to_server,
        control,
        control_pb2.DESCRIPTOR.services_by_name["ControlService"],
    )
    await server.start()
    channel = open_channel(server.address, RpcSettings())
    try:
        peer = common_pb2.PeerId(replica_id=name, incarnation="1" * 32)
        yield SimpleNamespace(replica=replica, channel=channel, peer=peer)
    finally:
        await channel.close()
        await server.stop()


@asynccontextmanager
async def router(
    *workers: tuple[str, Role, FakeOperations], tenants: Tenants | None = None
) -> AsyncIterator[ClusterCaches]:
    async with AsyncExitStack() as stack:
        known = [await stack.enter_async_context(worker(*one)) for one in workers]
        group: Any = SimpleNamespace(all=lambda: tuple(known), group=lambda: GROUP)
        yield ClusterCaches(RouterSettings(), MODEL, tenants or Tenants(SECRET), group)


def names(items: Sequence[Any]) -> list[str]:
    return [item.replica.replica_id for item in items]


async def test_every_worker_is_asked_and_named() -> None:
    """Prefill first; an encoder keeps no prefixes."""
    prefill, decode, encoder = FakeOperations(DEVICE, STORE), FakeOperations(DEVICE), FakeOperations()
    async with router(("d", Role.DECODE, decode), ("p", Role.PREFILL, prefill), ("e", Role.ENCODER, encoder)) as caches:
        answer = await caches.stats(control_pb2.CacheStatsRequest(), ())
    assert names(answer.tiers) == ["p", "p", "d"]
    assert not answer.failures
    assert not encoder.asked


async def test_a_shared_store_is_told_once() -> None:
    """Its sizes are those of the sweeper, who looks at all of it; what replicas did with it is added up. Another store,
    or one that nothing is known of, stays by itself."""
    sweeper, other, apart, unknown = (FakeOperations(DEVICE, STORE) for _ in range(4))
    sweeper.store = other.store = "one"
    apart.store = "two"
    sweeper.blocks, other.blocks = 7, 9
    other.sweeps = unknown.sweeps = False
    workers = (
        ("p0", Role.PREFILL, other),
        ("p1", Role.PREFILL, sweeper),
        ("p2", Role.PREFILL, apart),
        ("p3", Role.PREFILL, unknown),
    )
    async with router(*workers) as caches:
        answer = await caches.stats(control_pb2.CacheStatsRequest(), ())
    stores = [tier for tier in answer.tiers if tier.tier == STORE]
    assert [tier.store for tier in stores] == ["one", "two", ""]
    (shared, alone, _) = stores
    assert (shared.blocks, shared.segments, shared.hits, dict(shared.misses)) == (7, 4, 10, {"absent": 2})
    assert [peer.replica_id for peer in shared.sharing] == ["p0", "p1"]
    assert not shared.HasField("replica")
    assert (alone.replica.replica_id, len(alone.sharing)) == ("p2", 0)
    assert names([tier for tier in answer.tiers if tier.tier == DEVICE]) == ["p0", "p1", "p2", "p3"]


async def test_what_a_shared_store_drops_is_counted_once() -> None:
    """All replicas drop, since each has entries in flight, but only the first one finds what the store holds."""
    without, first, second = FakeOperations(DEVICE), FakeOperations(STORE), FakeOperations(STORE)
    first.store = second.store = "one"
    drop = first.clear

    async def clear(request: Any, metadata: Any) -> control_pb2.ClearCacheResponse:
        assert without.asked, "replicas without a store do not count: the next one is asked by itself too"
        assert not second.asked
        answer = await drop(request, metadata)
        second.left = 0
        return answer

    first.clear = clear  # type: ignore[method-assign]
    workers = (("p0", Role.PREFILL, without), ("p1", Role.PREFILL, first), ("p2", Role.PREFILL, second))
    async with router(*workers) as caches:
        answer = await caches.clear(control_pb2.ClearCacheRequest(everything=True), ())
    assert [(drop.tier, drop.replica.replica_id, drop.blocks) for drop in answer.drops] == [
        (DEVICE, "p0", 3),
        (STORE, "", 3),
    ]
    assert (answer.blocks, answer.snapshots) == (6, 3)
    assert second.asked


async def test_a_tenant_of_whom_nothing_is_known_is_not_found(tmp_path: Path) -> None:
    """A typing error is no erasure. Who left the file and has entries is erased, and who is served is known."""
    file = tmp_path / "t.toml"
    file.write_text(
        "".join(
            f'[{kind}.{name}]\nkeys = ["{hashlib.sha256(name.encode()).hexdigest()}"]\n'
            for kind, name in (("tenants", "acme"), ("operators", "alice"))
        )
    )
    metadata = (("authorization", "Bearer alice"),)
    one = FakeOperations(DEVICE, STORE)
    async with router(("p", Role.PREFILL, one), tenants=Tenants(SECRET, file)) as caches:
        left = control_pb2.ClearCacheRequest(tenant="left the file")
        assert (await caches.clear(left, metadata)).blocks == 6
        one.left = 0
        one.snapshots = 0
        with pytest.raises(NotFound, match=r"no tenant 'left the file'.*check the name"):
            await caches.clear(left, metadata)
        assert (await caches.clear(control_pb2.ClearCacheRequest(tenant="acme"), metadata)).blocks == 0
        with pytest.raises(NotFound, match="no tenant 'alice'"):
            await caches.clear(control_pb2.ClearCacheRequest(tenant="alice"), metadata)


async def test_a_worker_that_fails_is_told_beside_the_others() -> None:
    """An erasure that did not reach every worker must not look like one that did (L25)."""
    broken = FakeOperations(fault=Unavailable("the index does not answer"))
    good = FakeOperations(DEVICE, HOST)
    async with router(("p", Role.PREFILL, broken), ("d", Role.DECODE, good)) as caches:
        answer = await caches.clear(control_pb2.ClearCacheRequest(tenant="acme"), ())
        assert (answer.blocks, answer.snapshots) == (6, 2)
        assert names(answer.drops) == ["d", "d"]
        assert names(answer.failures) == ["p"]
        assert answer.failures[0].error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        good.fault = broken.fault
        with pytest.raises(Unavailable, match="index"):
            await caches.clear(control_pb2.ClearCacheRequest(everything=True), ())
    assert good.asked[0].tenant_tag == Tenants(SECRET).tag("acme")
    assert not good.asked[0].tenant, "names stay at the router"


async def test_a_foreign_namespace_leaves_device_pools_alone() -> None:
    """A device pool holds this router's model alone and knows no namespaces."""
    one = FakeOperations(DEVICE)
    async with router(("p", Role.PREFILL, one)) as caches:
        await caches.clear(control_pb2.ClearCacheRequest(namespace=b"\x07" * 32), ())
        await caches.clear(control_pb2.ClearCacheRequest(namespace=namespace(b"m" * 32, b"r" * 32, b"t" * 32)), ())
        none = await caches.clear(control_pb2.ClearCacheRequest(namespace=b"\x07" * 32, tiers=[DEVICE]), ())
    assert [list(request.tiers) for request in one.asked] == [[HOST, STORE], []]
    assert none.blocks == 0


async def test_an_entry_of_a_shared_store_is_told_once() -> None:
    keys = control_pb2.CacheKeys(blocks=[b"k" * 32])
    both = FakeOperations(DEVICE, STORE), FakeOperations(DEVICE, STORE)
    async with router(("p", Role.PREFILL, both[0]), ("d", Role.DECODE, both[1])) as caches:
        answer = await caches.find(control_pb2.FindCacheRequest(keys=keys), ())
    (block,) = answer.blocks
    assert [(place.tier, place.replica.replica_id) for place in block.places] == [
        (DEVICE, "p"),
        (STORE, ""),
        (DEVICE, "d"),
    ]
    assert block.end_tokens == 32
    assert answer.needs_snapshots


async def test_what_is_done_once_is_asked_of_one_with_a_store() -> None:
    without, store, other = FakeOperations(DEVICE), FakeOperations(STORE), FakeOperations(STORE)
    workers = (("p0", Role.PREFILL, without), ("p1", Role.PREFILL, store), ("p2", Role.PREFILL, other))
    async with router(*workers) as caches:
        swept = await caches.collect(control_pb2.CollectCacheRequest(), ())
        progress = [one async for one in caches.verify(control_pb2.VerifyCacheRequest(), ())]
    assert (swept.freed_bytes, swept.replica.replica_id) == (5, "p1")
    assert [(one.checked, one.done, one.replica.replica_id) for one in progress] == [(1, False, "p1"), (2, True, "p1")]
    assert not other.asked
    async with router(("p0", Role.PREFILL, without)) as caches:
        with pytest.raises(FailedPrecondition, match="store"):
            await caches.collect(control_pb2.CollectCacheRequest(), ())
        with pytest.raises(FailedPrecondition, match=r"cache\.store"):
            await anext(caches.verify(control_pb2.VerifyCacheRequest(), ()))


async def test_the_sweeper_of_a_shared_store_is_found() -> None:
    idle, sweeper = FakeOperations(STORE), FakeOperations(STORE)
    idle.sweeps = False
    async with router(("p", Role.PREFILL, idle), ("d", Role.DECODE, sweeper)) as caches:
        swept = await caches.collect(control_pb2.CollectCacheRequest(), ())
    assert (swept.freed_bytes, swept.replica.replica_id) == (5, "d")
    async with router(("p", Role.PREFILL, idle)) as caches:
        refused = await caches.collect(control_pb2.CollectCacheRequest(), ())
    assert (refused.refused, refused.replica.replica_id) == ("another process is the sweeper", "p")


async def test_nobody_to_ask_is_unavailable() -> None:
    async with router() as caches:
        with pytest.raises(Unavailable, match="no prefill or decode"):
            await caches.stats(control_pb2.CacheStatsRequest(), ())


async def test_operators_alone_may_ask(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"acme").hexdigest()
    (tmp_path / "t.toml").write_text(f'[tenants.acme]\nkeys = ["{digest}"]\n')
    one = FakeOperations(DEVICE)
    metadata = (("authorization", "Bearer acme"),)
    async with router(("p", Role.PREFILL, one), tenants=Tenants(SECRET, tmp_path / "t.toml")) as caches:
        for call in (
            caches.stats(control_pb2.CacheStatsRequest(), metadata),
            caches.clear(control_pb2.ClearCacheRequest(everything=True), metadata),
            caches.find(control_pb2.FindCacheRequest(), metadata),
            caches.pin(control_pb2.PinCacheRequest(), metadata),
            caches.collect(control_pb2.CollectCacheRequest(), metadata),
            anext(caches.verify(control_pb2.VerifyCacheRequest(), metadata)),
        ):
            with pytest.raises(PermissionDenied):
                await call
    assert not one.asked
