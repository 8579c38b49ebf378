"""Simulated time: what happens next. Equal times keep the order in which they were put in, so a run repeats exactly."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class Clock:
    """The agenda of a simulation. Times are seconds from its start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._agenda: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._put = 0

    def __len__(self) -> int:
        """What is still to happen."""
        return len(self._agenda)

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        """Do this at that time; not before now."""
        self._put += 1
        heapq.heappush(self._agenda, (max(time, self.now), self._put, action, arguments))

    def after(self, seconds: float, action: Action, *arguments: Any) -> None:
        """Do this so much later."""
        self.at(self.now + seconds, action, *arguments)

    @property
    def next(self) -> float | None:
        """When something happens next; None: never."""
        return self._agenda[0][0] if self._agenda else None

    def run(self, until: float) -> None:
        """Let happen what is due up to that time; now is that time afterwards."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= until:
            time, _, action, arguments = heapq.heappop(agenda)
            self.now = time
            action(*arguments)
        self.now = max(self.now, until)

    def step(self) -> bool:
        """Let one thing happen; False when there is none."""
        if not self._agenda:
            return False
        time, _, action, arguments = heapq.heappop(self._agenda)
        self.now = time
        action(*arguments)
        return True
