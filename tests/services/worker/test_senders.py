"""When a former member is dead: on the kernel's evidence, never by its silence (L6)."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.kvcache.transfer.peers import ProcessIdentity
from headrace.kvcache.transfer.wire import Envelope, encode_envelope
from headrace.services.runtime.ids import new_incarnation
from headrace.services.runtime.registry.base import Rank, Replica, Role
from headrace.services.runtime.registry.embedded import EmbeddedRegistry
from headrace.services.worker.senders import LEFT_S, SenderWatch
from headrace.v1 import common_pb2

PATIENCE_S = 60.0


def replica(agent: bytes) -> Replica:
    return Replica(
        id="prefill-1",
        incarnation=new_incarnation(),
        role=Role.PREFILL,
        data_centre="local",
        host="here",
        endpoint="127.0.0.1:1",
        model_name="m",
        model_fp=b"M" * 32,
        layout_fp=b"L" * 32,
        ranks=(Rank(0, "cpu", agent),),
    )


def agent_of(process: ProcessIdentity) -> bytes:
    envelope = Envelope(b"", process, (), ())
    return common_pb2.TransferAgent(agent_metadata=encode_envelope(envelope)).SerializeToString()


class Watched:
    """A watch over a registry in this process, and what it told."""

    def __init__(self) -> None:
        self.registry = EmbeddedRegistry()
        self.dead: asyncio.Queue[str] = asyncio.Queue()
        self.watch = SenderWatch(Role.PREFILL, self.dead.put)

    async def leave(self, member: Replica) -> None:
        """Join and leave, and wait until the watch has heard of both."""
        lease = await self.registry.register(member, 60.0)
        await lease.release()

    async def until(self, check: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not check():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    one = Watched()
    tasks = [asyncio.create_task(one.watch.follow(one.registry)), asyncio.create_task(one.watch.examine())]
    try:
        yield one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await one.registry.close()


def identity(pid: int) -> ProcessIdentity:
    own = ProcessIdentity.own()
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return ProcessIdentity(own.boot_id, own.pid_namespace, pid, int(stat[19]))


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


async def test_a_stopped_process_is_a_suspect_until_it_is_dead(child: subprocess.Popen[bytes]) -> None:
    """L6: its departure from the registry frees nothing; its death does, once."""
    async with watched() as one:
        child.send_signal(signal.SIGSTOP)
        member = replica(agent_of(identity(child.pid)))
        await one.leave(member)
        await one.until(lambda: one.watch.suspects == 1)
        assert one.dead.empty()
        child.kill()
        child.wait()
        async with asyncio.timeout(PATIENCE_S):
            assert await one.dead.get() == member.incarnation
        assert one.watch.suspects == 0
        assert one.dead.empty()


async def test_suspects_may_go_while_a_death_is_told(child: subprocess.Popen[bytes]) -> None:
    """L13: another life of a process begins just then; the examination goes on with what is left."""
    told: list[str] = []

    async def on_dead(incarnation: str) -> None:
        told.append(incarnation)
        for other in tuple(watch._suspects):
            watch._forget(other)

    watch = SenderWatch(Role.PREFILL, on_dead)
    first, second = new_incarnation(), new_incarnation()
    gone = (identity(child.pid),)
    child.kill()
    child.wait()
    for incarnation in (first, second):
        watch._processes[incarnation] = gone
        watch._suspect(replace(replica(b""), incarnation=incarnation))
    task = asyncio.create_task(watch.examine())
    async with asyncio.timeout(PATIENCE_S):
        while watch.suspects or not told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert (told, task.done()) == ([first], False)
    task.cancel()


async def test_a_life_may_be_told_of_by_either_task_and_once() -> None:
    """L13: of two former lives one is found dead while the other is told of; following the registry goes on."""
    told: list[str] = []

    async def on_dead(incarnation: str) -> None:
        told.append(incarnation)
        for other in tuple(watch._suspects):
            watch._forget(other)  # as the other task does

    watch = SenderWatch(Role.PREFILL, on_dead)
    first, second, own = new_incarnation(), new_incarnation(), (ProcessIdentity.own(),)
    for incarnation in (first, second):
        watch._processes[incarnation] = own
        watch._suspect(replace(replica(b""), incarnation=incarnation))
    await watch._follow_lives(new_incarnation(), own)
    assert told == [first]
    assert watch.suspects == 0


@pytest.mark.parametrize("same_host", [False, True])
async def test_one_that_cannot_be_looked_at_is_given_up_when_it_stays_away(same_host: bool) -> None:
    """L6: a process of another host, or of another container here, has left; only when it does not come back are its
    streams closed, by which alone it can write."""
    boot = ProcessIdentity.own().boot_id if same_host else "another-boot"
    now, left = [0.0], []

    def on_left(incarnation: str, *, elsewhere: bool) -> int:
        left.append((incarnation, elsewhere))
        return 1

    async with watched() as one:
        one.watch._on_left, one.watch._monotonic = on_left, lambda: now[0]
        back, gone = (replica(agent_of(ProcessIdentity(boot, "pid:[1]", i, 1))) for i in (1, 2))
        gone = replace(gone, id="prefill-2")
        await one.leave(back)
        await one.until(lambda: one.watch.suspects == 1)
        returned = await one.registry.register(back, 60.0)
        await one.until(lambda: one.watch.suspects == 0)
        await one.leave(gone)
        await one.until(lambda: one.watch.suspects == 1)
        assert not left
        now[0] = LEFT_S
        await one.until(lambda: one.watch.suspects == 0)
        assert left == [(gone.incarnation, True)]
        assert one.dead.empty()
        await returned.release()


async def test_of_another_host_nothing_is_known(child: subprocess.Popen[bytes]) -> None:
    """L6: no evidence, no verdict: its rows wait for a notice. A member without an identity is the same (L13)."""
    known = replica(agent_of(identity(child.pid)))
    child.kill()
    child.wait()
    async with watched() as one:
        await one.leave(replica(agent_of(ProcessIdentity("another-boot", "pid:[1]", 1, 1))))
        await one.leave(replica(b"no agent at all"))
        await one.leave(known)
        async with asyncio.timeout(PATIENCE_S):
            assert await one.dead.get() == known.incarnation
        assert one.watch.suspects == 0
        assert one.dead.empty()
