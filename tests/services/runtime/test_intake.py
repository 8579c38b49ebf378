"""Drains, and what becomes of them when the worker takes work again, or its process ends (L19)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.errors import FailedPrecondition
from headrace.services.runtime.health import Health
from headrace.services.runtime.intake import Intake
from headrace.services.runtime.lives import Lives
from headrace.services.runtime.registry.base import Role, State
from headrace.services.worker.role_change import CHANGING, RoleChange


class Server:
    """The part of ServiceServer that a drain uses."""

    draining = False

    async def refuse_admission(self) -> None:
        self.draining = True

    def take_work_again(self) -> None:
        self.draining = False


class Site:
    """A worker with one request that does not end."""

    def __init__(self) -> None:
        self.published: list[State] = []
        self.handed_over: list[str] = []
        server: Any = Server()
        self.intake = Intake(server, Health(), lambda: 1, SystemClock())
        self.intake.hand_over = self._hand_over
        self.intake.canary = self._canary
        membership: Any = SimpleNamespace(publish=lambda state: self.published.append(state))
        self.intake.membership = membership

    async def _hand_over(self, reason: str) -> None:
        self.handed_over.append(reason)

    async def _canary(self) -> None:
        """Well."""


async def test_who_takes_work_again_hands_nothing_over() -> None:
    """The operator has thought better of it: what runs stays, also when the time of that drain would be over."""
    site = Site()
    draining = asyncio.create_task(site.intake.drain(3600.0, hand_over=True))
    while not site.published:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    await site.intake.resume()
    async with asyncio.timeout(60):
        assert await draining == 1
    assert (site.handed_over, site.published) == ([], [State.DRAINING, State.READY])


@pytest.mark.parametrize("ends", [True, False])
async def test_a_change_that_is_given_up_takes_no_work_while_the_process_ends(*, ends: bool) -> None:
    """L19: a signal came during the change. The process refuses work and waits for what runs, and a change that fails
    must not undo that."""
    site, lives = Site(), Lives()
    lives.begin(Role.PREFILL, Role.DECODE)
    process: Any = SimpleNamespace(intake=site.intake)
    unused: Any = None
    site.intake.ending = CHANGING

    async def drain(wait_s: float, *, hand_over: bool) -> int:
        await site.intake.refuse()
        if ends:
            site.intake.ending = "this process is ending"
        return 1

    site.intake.drain = drain  # type: ignore[method-assign]
    changing = RoleChange(unused, lives, process)  # type: ignore[arg-type]
    await changing._change(unused, 0.0)
    assert not lives.changing
    assert site.intake.state is (State.DRAINING if ends else State.READY)
    if ends:
        with pytest.raises(FailedPrecondition, match="ending"):
            await site.intake.resume()
