"""Which writers of a store that hosts share still run, by the registry's word: there no lock tells of another host.

A writer is named `<node>-<boot>`, and a worker's boot is its incarnation (L14). It is dead when the registry does not
know it, but silence of the registry is no evidence (registry/base.py), and a process opens its store before it is a
member. So a writer that is not a member counts as running until it has been missing for a while, and then until the
registry, asked once more, answers without it. Who is declared dead and runs all the same loses no durable entry: it
sees after each sync that its lock is gone, and tells nobody of what it wrote since (segments/commit.py).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final

from headrace.services.runtime import logs
from headrace.services.runtime.ids import short
from headrace.services.runtime.registry.base import Registry, RegistryError, Removed

_log = logs.get(__name__)
LEFT_S: Final = 60.0
"""A member that left comes back by then, if it was the registry that had forgotten it."""
NEVER_SEEN_S: Final = 600.0
"""Longest way from the opening of a store to membership: twice the deadline of a canary."""
REMEMBERED: Final = 10_000
"""Absent processes that are known by name; who was forgotten is as one that was never seen."""


class StoreWriters:
    """`lives` is asked by a store's threads; `follow` runs on the event loop for the life of the process. Before it
    runs every writer lives."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._members: set[str] = set()
        self._patience: dict[str, float] = {}
        """Boot → when its absence becomes a doubt."""
        self._doubted: set[str] = set()
        self._dead: dict[str, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._doubts = asyncio.Event()

    def lives(self, writer: str) -> bool:
        """Whether `<node>-<boot>` may still run. Never waits: a doubt is resolved by a later call."""
        boot = writer.rpartition("-")[2]
        with self._lock:
            if self._loop is None or boot in self._members:
                return True
            if boot in self._dead:
                return False
            until = self._patience.setdefault(boot, self._monotonic() + NEVER_SEEN_S)
            if self._monotonic() >= until and boot not in self._doubted:
                self._doubted.add(boot)
                self._loop.call_soon_threadsafe(self._doubts.set)
        return True

    async def follow(self, registry: Registry) -> None:
        """Keep up with the registry, for ever."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(registry))
            tasks.create_task(self._resolve(registry))

    async def _watch(self, registry: Registry) -> None:
        async for event in registry.watch():
            boot = event.replica.incarnation
            with self._lock:
                if isinstance(event, Removed):
                    self._members.discard(boot)
                    self._patience[boot] = self._monotonic() + LEFT_S
                    for known in (self._patience, self._dead):
                        while len(known) > REMEMBERED:
                            known.pop(next(iter(known)))
                else:
                    self._members.add(boot)
                    self._patience.pop(boot, None)
                    self._dead.pop(boot, None)

    async def _resolve(self, registry: Registry) -> None:
        while True:
            await self._doubts.wait()
            self._doubts.clear()
            try:
                members = {replica.incarnation for replica in await registry.members()}
            except RegistryError as error:
                _log.warning("the registry does not say whether a store's writer is dead", error=str(error))
                with self._lock:
                    # Who starts meanwhile cannot become a member either: it gets its time again.
                    self._patience |= dict.fromkeys(self._doubted, self._monotonic() + NEVER_SEEN_S)
                    self._doubted.clear()
                continue
            with self._lock:
                gone = self._doubted - members - self._members
                self._dead |= dict.fromkeys(gone)
                self._doubted.clear()
            for boot in gone:
                _log.info("a writer of the store is dead: the registry does not know it", incarnation=short(boot))
