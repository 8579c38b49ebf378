"""Which segments this process has not sealed yet: nobody unlinks or seals them but itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection


class OwnSegments:
    """Paths from creation to seal. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: set[str] = set()

    def opened(self, path: str) -> None:
        with self._changed:
            self._open.add(path)

    def closed(self, path: str) -> None:
        """Sealed, unlinked, or given up for good."""
        with self._changed:
            self._open.discard(path)
            self._changed.notify_all()

    def paths(self) -> frozenset[str]:
        with self._changed:
            return frozenset(self._open)

    def wait_closed(self, paths: Collection[str], timeout: float) -> bool:
        """Until none of these is open any more."""
        until = time.monotonic() + timeout
        with self._changed:
            while not self._open.isdisjoint(paths):
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return False
        return True
