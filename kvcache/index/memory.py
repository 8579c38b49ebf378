"""The plain twin of every index: dicts under a lock. For tests, simulations, and stores that one process owns.

Its contents die with the process, so a new one always says `needs_rebuild`.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from headrace.kvcache.index.base import Index, IndexRow, IndexStats, check_row
from headrace.kvcache.keys import Key

_ROW_BYTES = 370
"""One row as CPython keeps it: the row and its integers, the key, its places in two dicts (measured)."""


class DictIndex(Index):
    """key → row, and group → keys."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._monotonic = monotonic
        self._rows: dict[Key, IndexRow] = {}
        self._groups: dict[str, dict[Key, None]] = {}
        self._generation = uuid.uuid4().hex
        self._complete = False
        self._lease: tuple[str, float] | None = None

    def put_many(self, rows: Sequence[IndexRow], deadline: float) -> None:
        for row in rows:
            check_row(row)
        with self._lock:
            for row in rows:
                self._discard(row.key)
                self._rows[row.key] = row
                self._groups.setdefault(row.group, {})[row.key] = None

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[IndexRow | None]:
        with self._lock:
            return [self._rows.get(key) for key in keys]

    def remove_many(self, rows: Sequence[IndexRow], deadline: float) -> int:
        removed = 0
        with self._lock:
            for row in rows:
                held = self._rows.get(row.key)
                if held is not None and held.group == row.group and held.place == row.place:
                    self._discard(row.key)
                    removed += 1
        return removed

    def drop_group(self, group: str, deadline: float) -> Sequence[IndexRow]:
        with self._lock:
            return [self._rows.pop(key) for key in self._groups.pop(group, {})]

    def rows_of(self, group: str, deadline: float) -> Sequence[IndexRow]:
        with self._lock:
            return [self._rows[key] for key in self._groups.get(group, {})]

    def groups(self, deadline: float) -> Sequence[str]:
        with self._lock:
            return list(self._groups)

    def scan(self, deadline: float) -> Iterator[IndexRow]:
        with self._lock:
            rows = list(self._rows.values())
        return iter(rows)

    def generation(self, deadline: float) -> str:
        with self._lock:
            return self._generation

    def claim_rebuild(self, owner: str, ttl_s: float, deadline: float) -> bool:
        with self._lock:
            now = self._monotonic()
            if self._lease is not None and self._lease[0] != owner and self._lease[1] > now:
                return False
            self._lease = (owner, now + ttl_s)
            return True

    def finish_rebuild(self, owner: str, deadline: float) -> bool:
        with self._lock:
            if self._lease is None or self._lease[0] != owner or self._lease[1] <= self._monotonic():
                return False
            self._lease = None
            self._complete = True
            return True

    def needs_rebuild(self, deadline: float) -> bool:
        with self._lock:
            return not self._complete

    def clear(self, deadline: float) -> None:
        with self._lock:
            self._rows.clear()
            self._groups.clear()

    def lose(self) -> None:
        """Become a new, empty index, as a server does that comes back without its data."""
        with self._lock:
            self._rows.clear()
            self._groups.clear()
            self._generation = uuid.uuid4().hex
            self._complete = False
            self._lease = None

    def stats(self, deadline: float) -> IndexStats:
        with self._lock:
            nbytes = len(self._rows) * _ROW_BYTES + sum(sys.getsizeof(group) for group in self._groups)
            return IndexStats(entries=len(self._rows), groups=len(self._groups), nbytes=nbytes)

    def close(self) -> None:
        pass

    def _discard(self, key: Key) -> None:
        row = self._rows.pop(key, None)
        if row is None:
            return
        keys = self._groups[row.group]
        del keys[key]
        if not keys:
            del self._groups[row.group]
