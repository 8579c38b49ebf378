"""Counters of one store, added to from every thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from headrace.kvcache.entries import Miss


class Counters:
    """Named integers, misses by cause, failed writes by cause. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()
        self._misses: Counter[Miss] = Counter()
        self._failed: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        with self._lock:
            self._values.update(amounts)

    def miss(self, cause: Miss, count: int = 1) -> None:
        if count:
            with self._lock:
                self._misses[cause] += count

    def failed(self, cause: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._failed[cause] += count

    def value(self, name: str) -> int:
        with self._lock:
            return self._values[name]

    def misses(self) -> Mapping[Miss, int]:
        with self._lock:
            return dict(self._misses)

    def failures(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._failed)
