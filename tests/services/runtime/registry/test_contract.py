"""One suite over both registries: the embedded one over gRPC, and a real etcd."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench._ports import free_ports
from headrace.services.runtime.registry.base import (
    IncompatibleReplicaError,
    LeaseLostError,
    LostReason,
    Rank,
    RegistryUnavailableError,
    Replica,
    Role,
    State,
)
from headrace.services.runtime.registry.lease import RenewedLease
from headrace.services.runtime.registry.member import Membership
from headrace.services.runtime.settings import RpcSettings


def _load_worlds() -> Any:
    """The helper beside this file: with --import-mode=importlib a test folder is no package."""
    name = "headrace_test_registry_worlds"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "worlds.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


worlds = _load_worlds()
replica, take, eventually = worlds.replica, worlds.take, worlds.eventually

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="no etcd binary (Debian: etcd-server): the etcd half is not tested"
)


@pytest.fixture(params=["embedded", pytest.param("etcd", marks=needs_etcd)])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    it = worlds.EmbeddedWorld() if request.param == "embedded" else worlds.EtcdWorld()
    await it.start()
    yield it
    await it.stop()


async def test_a_watch_starts_with_the_living_and_follows(world: Any) -> None:
    registry = world.client()
    first = await registry.register(replica("a"), world.ttl)
    await registry.register(replica("r", Role.ROUTER), world.ttl)
    watch = world.client().watch(frozenset({Role.DECODE}))
    assert await take(watch, 1) == [("Added", "a", "starting")]
    await first.update(replace(first.replica, state=State.READY, ranks=(Rank(0, "cpu"),)))
    second = await registry.register(replica("b"), world.ttl)
    await first.release()
    assert await take(watch, 3) == [("Changed", "a", "ready"), ("Added", "b", "starting"), ("Removed", "a", "ready")]
    assert [one.id for one in await registry.members()] == ["b", "r"]
    assert await registry.members(frozenset({Role.DECODE})) == (second.replica,)
    assert first.lost.cancelled()
    await watch.aclose()


async def test_a_replica_comes_back_as_it_was_published(world: Any) -> None:
    registry = world.client()
    lease = await registry.register(replica("a"), world.ttl)
    await lease.update(replace(lease.replica, ranks=(Rank(0, "cuda:0"), Rank(1, "cuda:1")), loads=(b"\x08\x01",)))
    assert await registry.members() == (lease.replica,)


async def test_an_update_changes_only_what_may_change(world: Any) -> None:
    lease = await world.client().register(replica("a"), world.ttl)
    with pytest.raises(ValueError, match="register again"):
        await lease.update(replace(lease.replica, endpoint="127.0.0.1:2"))


async def test_a_restarted_process_replaces_its_former_life(world: Any) -> None:
    """L14: the old incarnation is removed before the new one is added, and its holder is told to stop."""
    registry = world.client()
    old = await registry.register(replica("a"), world.ttl)
    watch = registry.watch()
    assert await take(watch, 1) == [("Added", "a", "starting")]
    await registry.register(replace(replica("a"), state=State.READY), world.ttl)
    assert await take(watch, 2) == [("Removed", "a", "starting"), ("Added", "a", "ready")]
    async with asyncio.timeout(worlds.PATIENCE):
        assert await asyncio.shield(old.lost) is LostReason.REPLACED
    with pytest.raises(LeaseLostError, match="another incarnation"):
        await old.update(replace(old.replica, state=State.DRAINING))
    await old.release()
    assert [one.state for one in await registry.members()] == [State.READY]


async def test_the_same_life_takes_its_place_over_without_a_removal(world: Any) -> None:
    registry = world.client()
    watch = registry.watch()
    me = replica("a")
    await registry.register(me, world.ttl)
    assert await take(watch, 1) == [("Added", "a", "starting")]
    again = await world.client().register(me, world.ttl)
    await again.update(replace(me, state=State.READY))
    assert await take(watch, 1) == [("Changed", "a", "ready")]


async def test_incompatible_layouts_are_refused_at_registration(world: Any) -> None:
    """L14: engine roles of one model name need equal fingerprints; the refused one leaves nothing behind (L10)."""
    registry = world.client()
    with pytest.raises(IncompatibleReplicaError, match="needs model_name"):
        await registry.register(replica("d", Role.DECODE, model_name=""), world.ttl)
    first = await registry.register(replica("d", Role.DECODE), world.ttl)
    for other in (replica("p", Role.PREFILL, layout=b"X"), replica("p", Role.PREFILL, model=b"X")):
        with pytest.raises(IncompatibleReplicaError, match=r"differs.*decode d"):
            await registry.register(other, world.ttl)
    with pytest.raises(IncompatibleReplicaError, match="model_fp"):
        await registry.register(replica("e", Role.ENCODER, model=b"X"), world.ttl)
    await registry.register(replica("e", Role.ENCODER), world.ttl)
    await registry.register(replica("p", Role.PREFILL, layout=b"X", model_name="other"), world.ttl)
    assert [one.id for one in await registry.members()] == ["d", "e", "p"]
    await first.release()
    await registry.register(replica("d2", layout=b"X"), world.ttl)


async def test_of_incompatible_replicas_that_start_together_one_kind_wins(world: Any) -> None:
    """L14: the check and the registration are one atomic act."""
    clients = [world.client() for _ in range(2)]
    results = await asyncio.gather(
        *(clients[i % 2].register(replica(f"d{i}", layout=b"XY"[i % 2 : i % 2 + 1]), world.ttl) for i in range(8)),
        return_exceptions=True,
    )
    refused = [one for one in results if isinstance(one, IncompatibleReplicaError)]
    members = await clients[0].members()
    assert len({one.layout_fp for one in members}) == 1
    assert len(members) + len(refused) == 8
    assert refused


async def test_a_killed_holder_is_removed_and_a_living_one_stays(world: Any) -> None:
    """L8: a dead holder frees in seconds, without anyone asking (L9); a renewed lease outlives its time to live."""
    registry = world.client()
    lease = await registry.register(replica("alive"), world.ttl)
    holder = await world.holder("dead")
    watch = registry.watch()
    assert await take(watch, 2) == [("Added", "alive", "starting"), ("Added", "dead", "starting")]
    holder.send_signal(signal.SIGKILL)
    assert await take(watch, 1) == [("Removed", "dead", "starting")]
    assert [one.id for one in await registry.members()] == ["alive"]
    assert not lease.lost.done()


async def test_a_stopped_holder_is_removed_and_readmitted_when_it_goes_on(world: Any) -> None:
    """L14: a returned peer is readmitted, not blacklisted."""
    holder = await world.holder("frozen")
    watch = world.client().watch()
    assert await take(watch, 1) == [("Added", "frozen", "starting")]
    holder.send_signal(signal.SIGSTOP)
    assert await take(watch, 1) == [("Removed", "frozen", "starting")]
    holder.send_signal(signal.SIGCONT)
    assert await take(watch, 1) == [("Added", "frozen", "starting")]


async def test_a_replaced_process_stops(world: Any) -> None:
    """L14: two processes under one id do not evict each other for ever."""
    holder = await world.holder("twin")
    await world.client().register(replica("twin", Role.ROUTER), world.ttl)
    async with asyncio.timeout(worlds.PATIENCE):
        assert await holder.wait() == 3


async def test_what_a_cut_off_watch_missed_is_told_as_the_difference(world: Any) -> None:
    """Gap-free: also when the history in between was compacted away."""
    registry = world.client()
    kept, changed, gone, _ = [await registry.register(replica(i), 60) for i in ("a", "b", "c", "d")]
    watch = world.client(through_proxy=True).watch()
    await take(watch, 4)
    await world.proxy.cut()
    await changed.update(replace(changed.replica, state=State.READY))
    await gone.release()
    await registry.register(replace(replica("d"), state=State.UNREADY), 60)
    await (await registry.register(replica("passing"), 60)).release()
    await registry.register(replica("e"), 60)
    await world.forget_history()
    await world.proxy.mend()
    assert await take(watch, 5) == [
        ("Removed", "c", "starting"),
        ("Changed", "b", "ready"),
        ("Removed", "d", "starting"),
        ("Added", "d", "unready"),
        ("Added", "e", "starting"),
    ]
    await kept.release()
    assert await take(watch, 1) == [("Removed", "a", "starting")]


async def test_members_and_watches_survive_a_restart_of_the_registry(world: Any) -> None:
    registry = world.client()
    membership = Membership(registry, replica("a"), world.ttl, lambda: pytest.fail("not replaced"))
    task = asyncio.create_task(membership.run())
    await membership.registered.wait()
    watch = world.client().watch()
    assert await take(watch, 1) == [("Added", "a", "starting")]
    await world.down()
    with pytest.raises(RegistryUnavailableError):
        await registry.members()
    membership.publish(state=State.READY)
    await world.up()

    async def back() -> bool:
        try:
            return [(one.id, one.state) for one in await registry.members()] == [("a", State.READY)]
        except RegistryUnavailableError:
            return False

    await eventually(back)
    async with asyncio.timeout(worlds.PATIENCE):
        while (event := await anext(watch)).replica.state is not State.READY:
            pass
    assert event.replica.incarnation == membership.replica.incarnation
    await membership.leave()
    async with asyncio.timeout(worlds.PATIENCE):
        await task
    assert await registry.members() == ()


@needs_etcd
async def test_a_second_endpoint_is_used_when_the_first_is_dead() -> None:
    world = worlds.EtcdWorld()
    await world.start()
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    registry = worlds.EtcdRegistry([dead, f"127.0.0.1:{world.port}"], "/test/", RpcSettings())

    async def answered() -> bool:
        try:
            return await registry.members() == ()
        except RegistryUnavailableError:
            return False

    await eventually(answered)
    await registry.close()
    await world.stop()


@needs_etcd
async def test_a_strange_key_does_not_blind_the_cluster() -> None:
    """L13: one unreadable value is skipped; replicas beside it are seen."""
    world = worlds.EtcdWorld()
    await world.start()
    registry = world.client()
    lease, _ = await registry.client.grant(60)
    assert await registry.client.put_if(b"/test/replicas/strange", b"\xff\xff", lease)
    await registry.register(replica("a"), world.ttl)
    assert [one.id for one in await registry.members()] == ["a"]
    await world.stop()


async def test_a_defect_in_renewing_is_not_taken_for_health() -> None:
    """L8: whoever waits for the loss of the lease learns that nobody renews it."""

    class Broken(RenewedLease):
        async def _renew(self) -> None:
            raise ZeroDivisionError

        async def _publish(self, replica: Replica) -> None: ...

        async def _revoke(self) -> None: ...

    lease = Broken(replica("a"), 0.03)
    lease._start()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(asyncio.shield(lease.lost), worlds.PATIENCE)


def test_a_replica_must_be_well_formed() -> None:
    with pytest.raises(ValueError, match="incarnation"):
        replica("a", incarnation="short")
    with pytest.raises(ValueError, match="free of"):
        replica("a/b")
    with pytest.raises(ValueError, match="32 bytes"):
        replace(replica("a"), layout_fp=b"short")
