"""What this process knows to be stored: put_many must not wait, and so refuses most of what is there already."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import WallClock
from headrace.kvcache.store.retention.classes import Lives, expired
from headrace.kvcache.store.retention.refresh import refreshed_class

_KEYS = 1 << 18
"""About 30 MB. What is forgotten is asked of the index before it is written."""


class KnownKeys:
    """Keys that were written, or found, lately. Thread-safe."""

    def __init__(self, lives: Lives, wall: WallClock, limit: int = _KEYS) -> None:
        self._lives = lives
        self._wall = wall
        self._limit = limit
        self._lock = threading.Lock()
        self._rows: OrderedDict[Key, tuple[RetentionClass, int]] = OrderedDict()

    def enough(self, retention: RetentionClass, expires_at: int, wanted: RetentionClass) -> bool:
        """Whether an entry that is stored so need not be written when it is offered as `wanted`: it is of no shorter
        class and has half of its life left."""
        now = self._wall()
        return not expired(expires_at, now) and refreshed_class(self._lives, retention, expires_at, wanted, now) is None

    def has(self, key: Key, wanted: RetentionClass) -> bool:
        """Whether a put of this key as `wanted` is known to be needless."""
        with self._lock:
            held = self._rows.get(key)
        return held is not None and self.enough(*held, wanted)

    def add(self, rows: Sequence[IndexRow]) -> None:
        with self._lock:
            for row in rows:
                self._rows[row.key] = (row.retention, row.expires_at)
                self._rows.move_to_end(row.key)
            while len(self._rows) > self._limit:
                self._rows.popitem(last=False)

    def discard(self, keys: Iterable[Key]) -> None:
        """The index or a volume says that they are not there."""
        with self._lock:
            for key in keys:
                self._rows.pop(key, None)
