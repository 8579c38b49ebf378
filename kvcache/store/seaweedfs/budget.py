"""How many bytes of payloads may be in memory at a time: read, and not yet released by whoever asked."""

from __future__ import annotations

import threading
import time


class ReadBudget:
    """Thread-safe. Something larger than all of it is let in when nothing else is."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, size: int, deadline: float) -> bool:
        """Whether there was room by `deadline` (time.monotonic seconds). Whoever gets True gives `size` back."""
        with self._changed:
            while self._taken and self._taken + size > self._limit:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return False
            self._taken += size
            return True

    def give(self, size: int) -> None:
        with self._changed:
            self._taken -= size
            self._changed.notify_all()

    @property
    def taken(self) -> int:
        """Bytes in use; zero at idle (L11)."""
        with self._changed:
            return self._taken
