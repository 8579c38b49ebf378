"""Whether a process takes work: drain, take work again, and end in time what a drain waits for (L19).

READY ──refuse──▶ DRAINING ──(drained, or handed over)──▶ the process ends, or begins another life
  ▲                  │
  └─────resume───────┘   with a canary, as at the start (L18)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import FailedPrecondition
from headrace.services.runtime.health import Health
from headrace.services.runtime.registry.base import State
from headrace.services.runtime.registry.member import Membership
from headrace.services.runtime.server import ServiceServer

POLL_S: Final = 0.02
"""Sizes of live sets have no event."""
LAST_WORDS_S: Final = 2.0
"""Longest wait until peers have taken the ends of what was handed over."""

Canary = Callable[[], Awaitable[None]]
HandOver = Callable[[str], Awaitable[None]]
"""Ends all that runs with UNAVAILABLE and the reason given, so that routers continue it elsewhere."""
_log = logs.get(__name__)


class Intake:
    """Of one life of one process. Belongs to the event loop's thread."""

    def __init__(self, server: ServiceServer, health: Health, live: Callable[[], int], clock: Clock) -> None:
        """`live` counts requests that a drain waits for."""
        self._server = server
        self._health = health
        self._live = live
        self._clock = clock
        self.hand_over: HandOver | None = None
        """None: this process cannot hand over, and what outlasts a drain is cut off when its server closes."""
        self.membership: Membership | None = None
        self.canary: Canary | None = None
        """Both set when the process has joined."""
        self.ending = ""
        """Why work is not taken again; empty while it may be."""
        self._resumed = 0
        """How often work was taken again."""

    @property
    def live(self) -> int:
        """Requests that a drain waits for."""
        return self._live()

    @property
    def state(self) -> State:
        """As published."""
        if self._server.draining:
            return State.DRAINING
        return State.READY if self._health.ready else State.UNREADY

    async def refuse(self) -> None:
        """Take no new work from now on; what runs goes on."""
        await self._server.refuse_admission()
        if self.membership is not None:
            self.membership.publish(state=State.DRAINING)

    async def drain(self, wait_s: float, *, hand_over: bool = False) -> int:
        """Refuse, and wait at most `wait_s` for what runs; then hand the rest over where that is asked for. Returns how
        many still run. Over, with nothing handed over, when work is taken again meanwhile."""
        await self.refuse()
        before = self._resumed
        await self._until_idle(wait_s, lambda: self._resumed == before)
        if hand_over and self.live and self._resumed == before:
            await self.end_rest("this worker drains and its time is over")
        return self.live

    async def end_rest(self, reason: str) -> None:
        """Hand over what still runs, and wait a moment until the routers have been told; a no-op when nothing does."""
        if self.hand_over is None or not self.live:
            return
        _log.info("handing over", live=self.live, reason=reason)
        await self.hand_over(reason)
        await self._until_idle(LAST_WORDS_S)

    async def idle(self) -> None:
        """Until nothing runs."""
        while self.live:  # noqa: ASYNC110 - see POLL_S
            await asyncio.sleep(POLL_S)

    async def resume(self) -> None:
        """Take work again, after a canary. Raises FailedPrecondition when the process is ending or has not joined."""
        self._check_open()
        if not self._server.draining:
            return
        assert self.canary is not None
        assert self.membership is not None
        await self._health.begin_again(self.canary)
        self._check_open()
        self._resumed += 1
        self._server.take_work_again()
        self.membership.publish(state=State.READY)
        _log.info("takes work again")

    def _check_open(self) -> None:
        if self.ending:
            raise FailedPrecondition(f"{self.ending}: it takes no work again; start another one")
        if self.membership is None:
            raise FailedPrecondition("this process has not joined the cluster yet")

    async def _until_idle(self, seconds: float, on: Callable[[], bool] = lambda: True) -> None:
        deadline = self._clock.monotonic() + seconds
        while self.live and on() and self._clock.monotonic() < deadline:  # noqa: ASYNC110 - see POLL_S
            await asyncio.sleep(POLL_S)
