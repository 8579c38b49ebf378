"""Refill an index that lost its contents, from the records themselves, while everybody goes on serving.

A Redis that comes back empty and a SQLite file that is gone both say `needs_rebuild`. Whichever process of a store
notices claims the rebuild (Index.claim_rebuild, a lease renewed while it works); all others go on: what the index does
not know yet is a miss, and a read is verified anyway (L3). Rows come from the engine (segments: sidecars and headers;
SeaweedFS: a scan of volumes) in any order; a row that the index got meanwhile and that lives at least as long stays.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from headrace.kvcache.index.base import Index, IndexRow, IndexUnavailable
from headrace.kvcache.store.base import StoreError, WallClock

_log = logging.getLogger(__name__)

RowSource = Callable[[], Iterator[IndexRow]]
"""Rows of every valid record that was not erased. StoreError or OSError: the records cannot be listed now."""


_GIVEN_UP_S = 0.001
"""A lease that ends at once."""


class RebuildState(enum.Enum):
    COMPLETE = "complete"
    """The index lost nothing, as far as is known."""
    ELSEWHERE = "elsewhere"
    """Another process refills it."""
    RUNNING = "running"
    FAILED = "failed"
    """The last try broke off; it is tried again."""


@dataclass(frozen=True)
class RebuildProgress:
    """What the rebuilder does now and did since it was made."""

    state: RebuildState = RebuildState.COMPLETE
    rows: int = 0
    """Rows that the running or last rebuild has read from records."""
    added: int = 0
    """Of these, rows that the index did not have, or had with a shorter life."""
    rebuilds: int = 0
    """Rebuilds that this process finished."""
    failure: str = ""
    """Why the last try broke off."""


@runtime_checkable
class Rebuilding(Protocol):
    """A store that refills its index."""

    @property
    def rebuild(self) -> RebuildProgress: ...


class Rebuilder:
    """Watches one index from a thread of its own and refills it when elected. Thread-safe."""

    def __init__(
        self,
        index: Index,
        rows: RowSource,
        *,
        owner: str = "",
        wall: WallClock = time.time,
        poll_s: float = 1.0,
        settle: Callable[[], None] = lambda: None,
        lease_s: float = 30.0,
        batch: int = 512,
        call_s: float = 2.0,
    ) -> None:
        """`owner` names this process among those that share the index (default: a random one). The index is asked
        every `poll_s` seconds, and when `notice` is called. `settle` runs after the last row and before the index is
        called complete: what was erased while the rows were read goes there."""
        self._index = index
        self._rows = rows
        self._owner = owner or secrets.token_hex(8)
        self._wall = wall
        self._poll_s = poll_s
        self._lease_s = lease_s
        self._settle = settle
        self._batch = batch
        self._call_s = call_s
        self._lock = threading.Lock()
        self._progress = RebuildProgress()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._looked = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def progress(self) -> RebuildProgress:
        with self._lock:
            return self._progress

    def start(self) -> None:
        """Begin to watch."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="index-rebuild", daemon=True)
            self._thread.start()

    def wait_first_look(self, timeout_s: float) -> bool:
        """Until the first look, and the rebuild that it may have been, is over; False on timeout."""
        return self._looked.wait(timeout_s)

    def notice(self) -> None:
        """Look now: the index did not answer, or forgot what it should know. Never blocks."""
        self._wake.set()

    def close(self) -> None:
        """Stop, at the latest after the batch at hand; a rebuild that is under way is left for another process, at
        once: the lease is given up."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self.progress.state is RebuildState.FAILED:
            with contextlib.suppress(IndexUnavailable):  # then it runs out by itself
                self._index.claim_rebuild(self._owner, _GIVEN_UP_S, self._deadline())

    def run_once(self) -> bool:
        """Rebuild now if the index needs it and nobody else does it; True if the index is complete afterwards. What
        the thread does at each look; for operators, tests and the opening of a store."""
        try:
            if not self._index.needs_rebuild(self._deadline()):
                self._tell(state=RebuildState.COMPLETE)
                return True
            if not self._index.claim_rebuild(self._owner, self._lease_s, self._deadline()):
                self._tell(state=RebuildState.ELSEWHERE)
                return False
            self._tell(state=RebuildState.RUNNING, rows=0, added=0, failure="")
            return self._refill()
        except (IndexUnavailable, StoreError, OSError) as error:
            self._tell(state=RebuildState.FAILED, failure=str(error) or type(error).__name__)
            _log.info("the index cannot be refilled now: %s", self.progress.failure)
            return False

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self.run_once()
            except Exception as error:  # noqa: BLE001 - the boundary: whatever one try raises, the next one comes
                _log.exception("the rebuild of the index broke off")
                self._tell(state=RebuildState.FAILED, failure=repr(error))
            self._looked.set()
            self._wake.wait(self._poll_s)
            self._wake.clear()

    def _refill(self) -> bool:
        rows = self._rows()
        began = time.monotonic()
        _log.info("the index is new or lost its contents; refilling it from the records")
        renew_at = time.monotonic() + self._lease_s / 3
        read = added = 0
        while batch := list(islice(rows, self._batch)):
            if self._stop.is_set():
                self._tell(state=RebuildState.FAILED, failure="the store was closed")
                return False
            if time.monotonic() >= renew_at:
                if not self._index.claim_rebuild(self._owner, self._lease_s, self._deadline()):
                    self._tell(state=RebuildState.ELSEWHERE)
                    return False
                renew_at = time.monotonic() + self._lease_s / 3
            read += len(batch)
            added += self._add(batch)
            self._tell(rows=read, added=added)
        self._settle()
        if not self._index.finish_rebuild(self._owner, self._deadline()):
            self._tell(state=RebuildState.FAILED, failure="the lease ran out, or the index lost its contents again")
            return False
        self._tell(state=RebuildState.COMPLETE, rebuilds=self.progress.rebuilds + 1)
        _log.info("the index is complete: %d rows, %d of them new, %.1f s", read, added, time.monotonic() - began)
        return True

    def _add(self, batch: list[IndexRow]) -> int:
        """Put the rows that the index lacks or has with a shorter life; returns how many."""
        now = self._wall()
        best: dict[bytes, IndexRow] = {}
        for row in batch:
            if row.expires_at and row.expires_at <= now:
                continue
            if row.key not in best or outlives(row, best[row.key]):
                best[row.key] = row
        held = self._index.held(list(best), self._deadline())
        wanted = [row for row, old in zip(best.values(), held, strict=True) if old is None or outlives(row, old)]
        if wanted:
            self._index.put_many(wanted, self._deadline())
        return len(wanted)

    def _deadline(self) -> float:
        return time.monotonic() + self._call_s

    def _tell(self, **changes: Any) -> None:
        with self._lock:
            self._progress = replace(self._progress, **changes)


def outlives(row: IndexRow, other: IndexRow) -> bool:
    """Whether `row` lives strictly longer than `other`; 0 never expires."""
    return other.expires_at != 0 and (row.expires_at == 0 or row.expires_at > other.expires_at)
