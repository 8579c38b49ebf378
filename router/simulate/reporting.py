"""What ranks tell the router of themselves, each at moments of its own; some are silent or lie (chaos.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from headrace.router.cost.prefill import PrefillBatch
from headrace.router.reports import Report
from headrace.router.simulate.clock import Clock
from headrace.router.simulate.routing import SimRouter
from headrace.router.topology import Role

Account = tuple[Report, PrefillBatch | None] | None
"""A rank's report and, of prefill, the batch of its last step; None from a dead one."""


class Reporting:
    """Asks every rank once in a period and tells the router."""

    def __init__(self, clock: Clock, router: SimRouter, every_s: float, seed: int) -> None:
        self._clock = clock
        self._router = router
        self._every_s = every_s
        self._random = np.random.default_rng((seed, 2))
        self.silent: set[tuple[Role, int]] = set()
        """Ranks that do not report."""
        self.liars: dict[tuple[Role, int], str] = {}
        """How ranks lie that do."""

    def begin(self, role: Role, rank: int, account: Callable[[], Account]) -> None:
        """A rank has joined; its first report comes at a random moment of the first period."""
        self._clock.after(float(self._random.uniform(0, self._every_s)), self._report, role, rank, account)

    def _report(self, role: Role, rank: int, account: Callable[[], Account]) -> None:
        self._clock.after(self._every_s, self._report, role, rank, account)
        if (role, rank) in self.silent:
            return
        told = account()
        if told is None:
            return
        report, batch = told
        lie = self.liars.get((role, rank))
        if lie is not None:
            report = lied(report, lie)
        self._router.report(role, rank, report, batch, self._clock.now)


def lied(report: Report, how: str) -> Report:
    """`lie`: an idle rank. `absurd`: counts that no rank can have (L22)."""
    if how == "lie":
        return Report(step=report.step, step_s=report.step_s)
    return replace(report, queued_tokens=-1, kv_tokens=-1)
