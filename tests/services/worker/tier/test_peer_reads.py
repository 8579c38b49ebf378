"""Reading a peer's host tier: real processes, real NIXL, real signals."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CMA, TCP = frozenset({"cma"}), frozenset({"tcp"})
WIRES = pytest.mark.parametrize("wires", [CMA, TCP], ids=["cma", "tcp"])
_incarnations = itertools.count(1)


@pytest.fixture(scope="session")
def parts() -> ModuleType:
    """The helpers of _worker.py."""
    spec = importlib.util.spec_from_file_location("peer_worker", Path(__file__).parent / "_worker.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class World:
    """A reader in this process; lessors and other readers in processes of their own."""

    def __init__(self, parts: ModuleType, idle: list[Any]) -> None:
        self.parts = parts
        self.idle = idle
        self.children: list[Any] = []
        self.workers: list[Any] = []

    async def reader(self, wires: frozenset[str], **more: Any) -> Any:
        worker = self.parts.Worker(f"{next(_incarnations):032x}", wires, **more)
        self.workers.append(worker)
        await worker.start()
        return worker

    async def child(self, wires: frozenset[str], *names: str, **more: Any) -> Any:
        """Started, with these entries; `child.replica` is its membership entry."""
        child = self.idle.pop() if self.idle else self.parts.Child()
        self.children.append(child)
        await asyncio.to_thread(child.start, f"{next(_incarnations):032x}", wires, **more)
        if names:
            await asyncio.to_thread(child.call, "put", *names)
        return child

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()
        for child in self.children:
            if child.is_alive:
                await asyncio.to_thread(child.call, "end")
                self.idle.append(child)
            else:
                child.close()


@pytest.fixture(scope="session")
def idle() -> Iterator[list[Any]]:
    """Processes that no test uses now."""
    children: list[Any] = []
    yield children
    for child in children:
        child.close()


@pytest.fixture
async def world(parts: ModuleType, idle: list[Any]) -> AsyncIterator[World]:
    made = World(parts, idle)
    yield made
    await made.close()


async def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Bounded polling."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.005)


def get(worker: Any, names: list[str], seconds: float = 20.0) -> Awaitable[list[str]]:
    return asyncio.to_thread(worker.get, names, seconds)


@WIRES
async def test_entries_come_verified_and_everything_is_given_back(wires: frozenset[str], world: World) -> None:
    """L1, L3, L11: blocks and a snapshot; over TCP the lessor writes them, over CMA they are read."""
    names = [f"b{number}" for number in range(12)] + ["s1"]
    lessor = await world.child(wires, *names)
    reader = await world.reader(wires)
    await reader.know(lessor.replica)
    assert await asyncio.to_thread(reader.lookup, [*names, "b99"], 20.0) == [True] * 13 + [False]
    assert await get(reader, [*names, "b99"]) == ["ok"] * 13 + ["absent"]
    await until(lambda: reader.idle(), "the reader is idle")
    await until(lambda: lessor.call("idle"), "the lessor is idle")
    stats = lessor.call("lease_stats")
    assert (stats.granted, stats.released, stats.leased_bytes) == (1, 1, 0)
    assert reader.peer_stats().hits == 13


async def test_entries_of_several_peers_in_one_read(world: World) -> None:
    first = await world.child(CMA, "b1", "b2", "b3")
    second = await world.child(CMA, "b3", "b4")
    reader = await world.reader(CMA)
    await reader.know(first.replica, second.replica)
    assert await get(reader, ["b1", "b2", "b3", "b4", "b5"]) == ["ok"] * 4 + ["absent"]
    await until(lambda: reader.idle(), "the reader is idle")


@WIRES
async def test_a_reader_stopped_past_its_lease_discards_what_it_got(wires: frozenset[str], world: World) -> None:
    """L1, L7: SIGSTOP in mid-read; the lease ends by the lessor's clock, the places get other entries; the reader
    wakes, reads those, and finds out by the digest. Over TCP the lessor's own write keeps the places until it is
    terminal."""
    names = [f"b{number}" for number in range(20)]
    lessor = await world.child(wires, *names, max_lease_s=1.0)
    reader = await world.child(wires)
    reader.call("know", lessor.replica)
    lessor.call("know", reader.replica)
    assert reader.call("get", names[:1], 20.0) == ["ok"]
    if wires is CMA:
        reader.call("arm")
        reader.send("get", names, 20.0)
        assert reader.gate.poll(30), "the read begins"
        reader.gate.recv()
    else:
        lessor.call("arm")
        reader.send("get", names, 20.0)
        assert lessor.gate.poll(30), "the write begins"
        lessor.gate.recv()
    reader.stop()
    await until(lambda: lessor.call("lease_stats").live == 0, "the lease ends by the lessor's clock")
    assert lessor.call("lease_stats").expired == 1
    lessor.call("forget")
    lessor.call("put", *[f"b{number}" for number in range(100, 160)])
    if wires is CMA:
        reader.gate.send("go on")
    else:
        assert lessor.call("lease_stats").sending == 1
        lessor.gate.send("go on")
    reader.go_on()
    got = await asyncio.to_thread(reader.receive)
    if wires is CMA:
        assert set(got) == {"ok", "digest"}
        assert got[0] == "ok"
    else:
        assert got == ["ok"] * len(names)
    assert reader.call("get", ["b158", "b159"], 20.0) == ["ok", "ok"]
    await until(lambda: reader.call("idle"), "the reader is idle")
    await until(lambda: lessor.call("idle"), "the lessor is idle")


async def test_a_lessor_killed_in_mid_read_is_a_miss_and_asked_once(world: World) -> None:
    """L6, L17: the read ends, its units come back, and nobody waits for a dead peer key by key."""
    names = [f"b{number}" for number in range(20)]
    lessor = await world.child(CMA, *names)
    other = await world.child(CMA, "b50")
    reader = await world.child(CMA)
    reader.call("know", lessor.replica, other.replica)
    assert reader.call("get", names[:1], 20.0) == ["ok"]
    reader.call("arm")
    reader.send("get", names, 20.0)
    assert reader.gate.poll(30), "the read begins"
    reader.gate.recv()
    lessor.kill()
    reader.gate.send("go on")
    got = await asyncio.to_thread(reader.receive)
    assert set(got) == {"absent"}, "another peer can be asked, so the source is not dead"
    failures = reader.call("peer_stats").failures
    assert failures >= 1
    assert reader.call("get", names, 0.3) == ["absent"] * len(names)
    assert reader.call("peer_stats").failures - failures <= 1
    assert reader.call("get", ["b50"], 20.0) == ["ok"]
    await until(lambda: reader.call("idle"), "the reader is idle")


async def test_the_only_peer_is_dead(world: World) -> None:
    """L17: told as such, so that the loader leaves the whole source alone."""
    lessor = await world.child(CMA, "b1")
    reader = await world.reader(CMA)
    await reader.know(lessor.replica)
    assert await asyncio.to_thread(reader.lookup, ["b1"], 20.0) == [True]
    lessor.kill()
    assert await get(reader, ["b1"]) == ["not_connected"]
    await until(lambda: reader.idle(), "the reader is idle")


async def test_a_lessor_stopped_in_mid_write_keeps_the_buffer_in_quarantine(world: World) -> None:
    """L6, L7: over TCP a stopped lessor may still write; its units are nobody's until it says that it is done."""
    names = [f"b{number}" for number in range(10)]
    lessor = await world.child(TCP, *names)
    reader = await world.reader(TCP)
    await reader.know(lessor.replica)
    lessor.call("know", reader.replica())
    assert await get(reader, names[:1]) == ["ok"]
    lessor.call("arm")
    reading = asyncio.ensure_future(get(reader, names, 3.0))
    assert await asyncio.to_thread(lessor.gate.poll, 30), "the write begins"
    lessor.gate.recv()
    lessor.stop()
    assert await reading == ["timeout"] * len(names)
    assert reader.peer_stats().units_quarantined == len(names)
    assert reader.peers.wire.unquiet == 1
    lessor.go_on()
    lessor.gate.send("go on")
    await until(lambda: reader.idle(), "the late write is over and its units are free")
    await until(lambda: lessor.call("idle"), "the lessor is idle")


async def test_a_lessor_killed_in_mid_write_frees_the_buffer_by_evidence(world: World) -> None:
    """L6: silence frees nothing, the kernel's word does."""
    names = [f"b{number}" for number in range(10)]
    lessor = await world.child(TCP, *names)
    reader = await world.reader(TCP)
    lease = await reader.registry.register(lessor.replica, 600.0)
    await until(lambda: lessor.incarnation in reader.peers.wire.candidates(), "the lessor is known")
    lessor.call("know", reader.replica())
    assert await get(reader, names[:1]) == ["ok"]
    lessor.call("arm")
    reading = asyncio.ensure_future(get(reader, names, 20.0))
    assert await asyncio.to_thread(lessor.gate.poll, 30), "the write begins"
    lessor.kill()
    assert await reading == ["not_connected"] * len(names)
    assert reader.peer_stats().units_quarantined == len(names)
    await lease.release()
    await until(lambda: reader.idle(), "the lessor left, and the kernel says that it is dead")


async def test_a_dead_readers_lease_ends_at_once(world: World) -> None:
    """L8: by evidence of death, long before the lease's own end."""
    names = [f"b{number}" for number in range(10)]
    lessor = await world.reader(CMA, max_lease_s=1000.0)
    lessor.put(*names)
    reader = await world.child(CMA)
    lease = await lessor.registry.register(reader.replica, 600.0)
    await until(lambda: reader.incarnation in lessor.peers.wire.candidates(), "the reader is known")
    await asyncio.to_thread(reader.call, "know", lessor.replica())
    await asyncio.to_thread(reader.call, "arm")
    reader.send("get", names, 500.0)
    assert await asyncio.to_thread(reader.gate.poll, 30), "the handshake or read begins"
    await until(lambda: lessor.lease_stats().live == 1, "the lease")
    reader.kill()
    await lease.release()
    await until(lambda: lessor.idle(), "the lease ends")
    assert lessor.lease_stats().bereaved == 1
