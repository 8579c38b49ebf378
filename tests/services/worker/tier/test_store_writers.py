"""Who still writes to a store that hosts share: by the registry's word, never by its silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.kvcache.store.open import StoreSettings
from headrace.services.runtime.ids import new_incarnation
from headrace.services.runtime.registry.base import (
    Added,
    Event,
    RegistryUnavailableError,
    Removed,
    Replica,
    Role,
)
from headrace.services.worker.cache_settings import CacheSection
from headrace.services.worker.tier import assembly
from headrace.services.worker.tier.assembly import WorkerTier
from headrace.services.worker.tier.store_writers import LEFT_S, NEVER_SEEN_S, StoreWriters
from tests.kvcache.tier.fakes import FakeStore


class FakeRegistry:
    """Says what the test says, and counts how often it is asked who is there."""

    def __init__(self) -> None:
        self.living: dict[str, Replica] = {}
        self.away = False
        self.asked = 0
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def add(self, boot: str) -> None:
        self.living[boot] = Replica(f"w-{boot[:4]}", boot, Role.PREFILL, "dc", "other", "h:1")
        self._events.put_nowait(Added(self.living[boot]))

    def remove(self, boot: str) -> None:
        self._events.put_nowait(Removed(self.living.pop(boot)))

    async def members(self, roles: frozenset[Role] = frozenset()) -> tuple[Replica, ...]:
        self.asked += 1
        if self.away:
            raise RegistryUnavailableError("away")
        return tuple(self.living.values())

    async def watch(self, roles: frozenset[Role] = frozenset()) -> AsyncGenerator[Event, None]:
        while True:
            yield await self._events.get()


class Rig:
    def __init__(self) -> None:
        self.now = 1000.0
        self.registry = FakeRegistry()
        self.writers = StoreWriters(lambda: self.now)

    async def settle(self) -> None:
        """Everything that can happen without time passing has happened."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def lives(self, boot: str) -> bool:
        """The answer after a doubt has been resolved."""
        await self.settle()
        self.writers.lives(f"host-{boot}")
        await self.settle()
        return self.writers.lives(f"host-{boot}")


@asynccontextmanager
async def following() -> AsyncIterator[Rig]:
    rig = Rig()
    registry: Any = rig.registry
    task = asyncio.create_task(rig.writers.follow(registry))
    await rig.settle()
    try:
        yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_nobody_is_dead_before_the_registry_is_followed() -> None:
    """L8: no evidence, no death."""
    writers = StoreWriters(lambda: 1e9)
    assert writers.lives(f"host-{new_incarnation()}")


async def test_a_member_that_left_is_dead_when_it_stays_away() -> None:
    """A registry that restarts tells of everybody's leaving; they are back before anybody is given up."""
    boot = new_incarnation()
    async with following() as rig:
        rig.registry.add(boot)
        rig.now += 10 * NEVER_SEEN_S
        assert await rig.lives(boot)
        rig.registry.remove(boot)
        assert await rig.lives(boot)
        rig.now += LEFT_S / 2
        rig.registry.add(boot)
        rig.now += LEFT_S
        assert await rig.lives(boot)
        rig.registry.remove(boot)
        await rig.settle()
        rig.now += LEFT_S
        assert not await rig.lives(boot)
        assert rig.registry.asked == 1, "one question for one death"
        rig.registry.add(boot)
        assert await rig.lives(boot), "evidence to the contrary"


async def test_who_was_never_a_member_has_the_time_of_a_start() -> None:
    """A process opens its store before it joins; one that died before this one came never joins."""
    starting, dead = new_incarnation(), new_incarnation()
    async with following() as rig:
        assert await rig.lives(starting)
        assert await rig.lives(dead)
        rig.now += NEVER_SEEN_S - 1
        rig.registry.add(starting)
        assert await rig.lives(dead)
        rig.now += 1
        assert await rig.lives(starting)
        assert not await rig.lives(dead)


async def test_a_silent_registry_kills_nobody() -> None:
    """What it does not say is no evidence, and who starts while it is away gets its time again."""
    boot = new_incarnation()
    async with following() as rig:
        assert await rig.lives(boot)
        rig.registry.away = True
        rig.now += NEVER_SEEN_S
        assert await rig.lives(boot)
        rig.registry.away = False
        assert await rig.lives(boot)
        rig.now += NEVER_SEEN_S
        assert not await rig.lives(boot)


async def test_who_is_a_member_by_the_time_of_the_question_lives() -> None:
    """The watch may be behind."""
    boot = new_incarnation()
    async with following() as rig:
        assert await rig.lives(boot)
        rig.registry.living[boot] = Replica("w", boot, Role.DECODE, "dc", "other", "h:1")
        rig.now += NEVER_SEEN_S
        assert await rig.lives(boot)


@pytest.mark.parametrize(("url", "shared"), [("3fs:///mount/store", True), ("file:///var/store", False)])
async def test_a_worker_asks_the_registry_where_locks_do_not_reach(
    url: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 3FS the worker's incarnation names it as a writer, so that others find it in the registry; flock is better
    evidence where there is one."""
    opened: list[tuple[StoreSettings, Callable[[str], bool] | None]] = []

    def open_store(settings: StoreSettings, *, liveness: Callable[[str], bool] | None, **_: object) -> FakeStore:
        opened.append((settings, liveness))
        return FakeStore()

    monkeypatch.setattr(assembly, "open_store", open_store)
    monkeypatch.setattr(assembly, "TierWriter", lambda *_, **__: None)
    pool: Any = SimpleNamespace(layout=SimpleNamespace(block_tokens=16))
    me, other = new_incarnation(), new_incarnation()
    tier = await WorkerTier.open(
        CacheSection(store=url), pool, replica_id="w", incarnation=me, events=lambda change: None
    )
    ((settings, liveness),) = opened
    registry: Any = FakeRegistry()
    tasks = tier.tasks(registry)
    assert len(tasks) == int(shared)
    assert settings.boot == (me if shared else "")
    assert (liveness is not None) is shared
    for task in tasks:
        following = asyncio.create_task(task)
        await asyncio.sleep(0)
        assert liveness is not None
        assert liveness(f"host-{other}")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
