"""The store's index as the router asks it: all keys of a prompt in one call, off the event loop, late is unknown (L17).

The router is a reader. What it hears is a hint, so it neither opens the store nor verifies anything; a dead index is
found dead once, by a circuit breaker, and then costs nothing until it answers again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from headrace.kvcache.index.base import Index, IndexUnavailable
from headrace.kvcache.index.breaker import CircuitBreaker
from headrace.kvcache.index.open import SQLITE_FILE, open_index
from headrace.kvcache.keys import Key
from headrace.services.router.settings import IndexSection
from headrace.services.runtime import logs
from headrace.services.runtime.settings_load import SettingsError

_log = logs.get(__name__)
THREADS: Final = 2
AT_ONCE: Final = 16
"""Calls under way; more are not begun (L12)."""
PATIENCE_S: Final = 0.25
"""A call may end this late: its answer is of use to the next prompt, but nobody waits for it."""


class StoreLookup:
    """Asks one index. Belongs to the event loop's thread; calls run on threads of its own."""

    def __init__(
        self,
        open_it: Callable[[], Index | None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`open_it` is called on a thread at the first question, and again while it gives None: no writer has made the
        index yet."""
        self._open = open_it
        self._monotonic = monotonic
        self._wall = wall
        self._index: Index | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store-lookup")
        self._breaker = CircuitBreaker(monotonic=monotonic)
        self._under_way = 0
        self.calls = 0
        self.keys = 0
        """Asked since start."""
        self.unanswered: Counter[str] = Counter()
        """Questions without an answer, by cause."""

    async def present(self, keys: Sequence[Key]) -> Sequence[bool] | None:
        """Which keys the store has; None: not known."""
        if self._under_way >= AT_ONCE:
            self.unanswered["busy"] += 1
            return None
        if not self._breaker.allow():
            self.unanswered["breaker"] += 1
            return None
        self._under_way += 1
        self.calls += 1
        self.keys += len(keys)
        try:
            asked = asyncio.get_running_loop().run_in_executor(self._threads, partial(self._ask, list(keys)))
            answer = await asked
        except IndexUnavailable as error:
            self.unanswered["unavailable"] += 1
            self._breaker.failed()
            _log.warning("the store's index does not answer", error=str(error))
            return None
        finally:
            self._under_way -= 1
        self._breaker.succeeded()
        if answer is None:
            self.unanswered["no_index"] += 1
        return answer

    def _ask(self, keys: Sequence[Key]) -> Sequence[bool] | None:
        if self._index is None:
            self._index = self._open()
        if self._index is None:
            return None
        rows = self._index.get_many(keys, self._monotonic() + PATIENCE_S)
        now = self._wall()
        return [row is not None and (row.expires_at == 0 or row.expires_at > now) for row in rows]

    async def close(self) -> None:
        """No question comes any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._index is not None:
            await asyncio.to_thread(self._index.close)


def open_lookup(settings: IndexSection) -> StoreLookup | None:
    """None without a store. Raises SettingsError for a store whose index cannot be found from here."""
    if not settings.store:
        return None
    scheme, _, rest = settings.store.partition("://")
    directory = settings.local_directory or (rest if scheme == "file" else "")
    if settings.store_index == "sqlite" and not directory:
        raise SettingsError(
            f"index.store {settings.store} keeps its index elsewhere: set index.store_index to the workers' cache.index"
        )
    file = Path(directory) / SQLITE_FILE if settings.store_index == "sqlite" else None
    if settings.store_index.startswith("sqlite:///"):
        file = Path(settings.store_index.removeprefix("sqlite://"))

    def open_it() -> Index | None:
        """A reader makes no index: the first writer does, and knows what to fill it with."""
        if file is not None and not file.is_file():
            return None
        # Without rows in front: what writers drop must be missing here at once.
        return open_index(settings.store_index, Path(directory or "/"), settings.name, cached_rows=0)

    return StoreLookup(open_it)
