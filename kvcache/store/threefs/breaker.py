"""When to stop asking a mount that does not answer, and when to try again (L17: decided once per dead target).

Closed: calls go through. Open: every call is refused at once. After a pause one probe may run (half-open): its success
closes the breaker, its failure doubles the pause. Pure; the clock is injected. Thread-safe.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True)
class BreakerSettings:
    timeouts_in_row: int = 16
    """So many calls without an answer in time, with none answered between, and the mount counts as gone. A slow file
    system that still answers some calls in time never gets there."""
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0

    def __post_init__(self) -> None:
        if self.timeouts_in_row < 1 or not 0 < self.first_pause_s <= self.longest_pause_s:
            raise ValueError("timeouts_in_row must be at least 1, and 0 < first_pause_s ≤ longest_pause_s")


class CircuitBreaker:
    def __init__(self, settings: BreakerSettings, clock: Callable[[], float], on_open: Callable[[], None]) -> None:
        """`on_open` is called (outside the lock) whenever the breaker goes from closed to open."""
        self._settings = settings
        self._clock = clock
        self._on_open = on_open
        self._lock = threading.Lock()
        self._state = State.CLOSED
        self._timeouts = 0
        self._pause = settings.first_pause_s
        self._probe_at = 0.0
        self._opened = 0

    @property
    def state(self) -> State:
        return self._state

    @property
    def opened(self) -> int:
        """How often it has gone from closed to open."""
        return self._opened

    def allows(self) -> bool:
        """Whether an ordinary call may go to the mount now."""
        return self._state is State.CLOSED

    def answered(self) -> None:
        """A call got an answer in time, be it an error of the file system's own."""
        self._timeouts = 0

    def timed_out(self) -> None:
        with self._lock:
            self._timeouts += 1
            if self._timeouts < self._settings.timeouts_in_row:
                return
        self.trip()

    def trip(self) -> None:
        """The mount is gone: open now."""
        with self._lock:
            if self._state is not State.CLOSED:
                return
            self._state = State.OPEN
            self._opened += 1
            self._pause = self._settings.first_pause_s
            self._probe_at = self._clock() + self._pause
        self._on_open()

    def probe_in(self) -> float | None:
        """Seconds until a probe may run; None when none is needed or one is running."""
        with self._lock:
            return max(0.0, self._probe_at - self._clock()) if self._state is State.OPEN else None

    def begin_probe(self) -> bool:
        """Become the one probe, if it is time."""
        with self._lock:
            if self._state is not State.OPEN or self._clock() < self._probe_at:
                return False
            self._state = State.HALF_OPEN
            return True

    def end_probe(self, success: bool) -> None:
        with self._lock:
            if self._state is not State.HALF_OPEN:
                return
            if success:
                self._state = State.CLOSED
                self._timeouts = 0
                return
            self._state = State.OPEN
            self._pause = min(2 * self._pause, self._settings.longest_pause_s)
            self._probe_at = self._clock() + self._pause
