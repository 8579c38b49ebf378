"""A circuit breaker: a dead server is found dead once, not once per key (L17)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed: every call may go. After a failure it opens for `retry_s`; then one caller at a time is let through as a
    probe. Its success closes it, its failure doubles the wait, up to `max_retry_s`. Calls that were under way when it
    opened and fail too, of which a busy process has many, change nothing. Thread-safe."""

    def __init__(
        self, retry_s: float = 0.25, max_retry_s: float = 5.0, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        self._monotonic = monotonic
        self._first_wait = retry_s
        self._longest_wait = max_retry_s
        self._wait = retry_s
        self._open_until: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether the last call failed."""
        with self._lock:
            return self._open_until is not None

    def allow(self) -> bool:
        """Whether to try now. Whoever gets True from an open breaker is its probe; the next one comes a wait later,
        should this one never report."""
        with self._lock:
            if self._open_until is None:
                return True
            now = self._monotonic()
            if now < self._open_until:
                return False
            self._open_until = now + self._wait
            self._probing = True
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._open_until = None
            self._probing = False
            self._wait = self._first_wait

    def failed(self) -> None:
        with self._lock:
            if self._open_until is not None:
                if not self._probing:
                    return
                self._probing = False
                self._wait = min(self._wait * 2, self._longest_wait)
            self._open_until = self._monotonic() + self._wait
