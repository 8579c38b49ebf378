"""A whole process in small: canary, member, DRAINING before anything closes, gone."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import ClassVar

import pytest

from headrace.services.runtime.control import Inspection
from headrace.services.runtime.lifecycle import EXIT_FAILED, Lifecycle
from headrace.services.runtime.process import ServiceProcess
from headrace.services.runtime.registry.base import Replica, Role, State
from headrace.services.runtime.registry.embedded import EmbeddedRegistry
from headrace.services.runtime.settings import LogSettings, ServiceSettings
from headrace.v1 import control_pb2

PATIENCE = 60.0


class RouterLike(ServiceSettings):
    """A role."""

    ROLE: ClassVar[Role] = Role.ROUTER
    log: LogSettings = LogSettings(level="error")


class DecodeLike(ServiceSettings):
    """A role."""

    ROLE: ClassVar[Role] = Role.DECODE
    log: LogSettings = LogSettings(level="error")


async def _run(settings: ServiceSettings, start: Callable[[Lifecycle], Awaitable[None]]) -> int:
    async with asyncio.timeout(PATIENCE):
        return await Lifecycle(settings.stop, hard_exit=pytest.fail).run(start)


async def _inspect(check: bool) -> Inspection:
    return Inspection(requests=control_pb2.Conservation(), pools=(), loads=(), problems=())


async def _sings() -> None:
    return None


async def test_the_life_of_a_member() -> None:
    """L18, L19: a member only after its canary, DRAINING while its requests finish, gone at the end."""
    registry = EmbeddedRegistry()
    watch = registry.watch()
    requests = {"running"}

    async def start(life: Lifecycle) -> None:
        process = ServiceProcess(RouterLike(), life)
        await process.serve(_inspect, lambda: len(requests), process.replica)

        async def canary() -> None:
            assert not process.health.ready
            assert await registry.members() == ()

        await process.join(process.replica(), canary, registry)
        added = await anext(watch)
        assert added.replica.state is State.READY
        assert (added.replica.endpoint, added.replica.incarnation) == (process.server.address, life.incarnation)
        with await asyncio.to_thread(urllib.request.urlopen, f"http://{process.metrics_endpoint}", timeout=60) as page:
            assert b"headrace_info{" in page.read()

        async def finish() -> None:
            assert (await anext(watch)).replica.state is State.DRAINING
            assert not process.health.ready
            requests.clear()

        life.on_drain("finish", finish)
        life.stop("test")

    assert await _run(RouterLike(), start) == 0
    assert await registry.members() == ()
    await watch.aclose()
    await registry.close()


async def test_a_misfit_ends() -> None:
    """L14: refused at registration, the process ends with a failure; the one that was there goes on."""
    registry = EmbeddedRegistry()

    async def member(life: Lifecycle, layout: bytes) -> None:
        process = ServiceProcess(DecodeLike(), life)

        def published() -> Replica:
            return replace(process.replica(), model_name="m", layout_fp=layout * 32, model_fp=b"M" * 32)

        await process.serve(_inspect, lambda: 0, published)
        await process.join(published(), _sings, registry)

    async def both(life: Lifecycle) -> None:
        await member(life, b"L")
        first = await anext(registry.watch())
        assert await _run(DecodeLike(), lambda other: member(other, b"X")) == EXIT_FAILED
        assert await registry.members() == (first.replica,)
        life.stop("test")

    assert await _run(DecodeLike(), both) == 0
    await registry.close()
