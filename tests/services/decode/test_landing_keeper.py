"""A worker that turned unready for its landing memory becomes ready again by a canary, however often that takes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.messages import RebuildLanding
from headrace.services.decode import landing
from headrace.services.runtime.health import Health
from headrace.services.worker.canary import CanaryFailed

SOUND: Any = SimpleNamespace(landing_sound=True)
UNSOUND: Any = SimpleNamespace(landing_sound=False)


class Link:
    """An engine whose former landing region is written yet."""

    async def call(self, command: object) -> Any:
        return SimpleNamespace(version=2) if isinstance(command, RebuildLanding) else ()


async def test_a_canary_that_is_handed_over_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """L13, L18: a drain ends everything that runs, the canary too, and work is taken again. The process, with all the
    requests that it serves, does not end for it."""
    monkeypatch.setattr(landing, "register_landing", lambda *_: None)
    monkeypatch.setattr(landing, "AGAIN_S", 0.0)
    ends: list[Exception] = [
        CanaryFailed("the warm-up generation ended with error: this worker drains"),
        EngineError(ErrorCode.RESOURCE_EXHAUSTED, "no room"),
    ]

    async def canary() -> None:
        if ends:
            raise ends.pop(0)

    health = Health()
    process: Any = SimpleNamespace(health=health, server=SimpleNamespace(draining=False), membership=None)
    unused: Any = SimpleNamespace()
    link: Any = Link()
    keeper = landing.LandingKeeper(process, unused, link, lambda: unused, canary, max_regions=3)
    running = asyncio.create_task(keeper.run())
    keeper.see(UNSOUND)
    async with asyncio.timeout(60):
        while not (health.ready or running.done()):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
    assert not running.done()
    assert not ends
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
