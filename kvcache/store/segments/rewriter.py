"""Background re-appends: a used prefix that must live on, an entry of a longer class, a pin.

One thread reads the old copies, verified, and queues them again; the index then points to the new copy, and the old one
goes with its segment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.kvcache.entries import Loaded, RetentionClass
from headrace.kvcache.index.base import Index, IndexRow, IndexUnavailable
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import WallClock
from headrace.kvcache.store.retention.classes import Lives
from headrace.kvcache.store.retention.refresh import Refresh, Refresher, UsedEntry
from headrace.kvcache.store.segments.intake import Again, Intake
from headrace.kvcache.store.segments.pending import Ticket
from headrace.kvcache.store.segments.reader import ReadRows

_log = logging.getLogger(__name__)
_MAX_USES = 1024
"""Used prefixes waiting to be looked at; older ones are forgotten first (L12)."""
_READ_S = 10.0
_QUEUE_S = 30.0


class Used(Protocol):
    """Is told which records a use found, prefix first."""

    def __call__(self, rows: Sequence[IndexRow], *, hit: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class _Use:
    keys: tuple[Key, ...]
    retention: RetentionClass
    hit: bool


class Rewriter:
    """Thread-safe; `start` begins the thread."""

    def __init__(
        self,
        intake: Intake,
        index: Index,
        read: ReadRows,
        used: Used,
        lives: Lives,
        wall: WallClock,
        epoch: Callable[[], int],
        covered: Callable[[IndexRow], bool],
        index_timeout_s: float,
        batch_bytes: int,
    ) -> None:
        """`batch_bytes`: what is read and held at once, well under all read buffers."""
        self._batch_bytes = batch_bytes
        self._intake = intake
        self._index = index
        self._read = read
        self._used = used
        self._wall = wall
        self._epoch = epoch
        self._covered = covered
        self._index_timeout_s = index_timeout_s
        self._refresher = Refresher(lives)
        self._flying: list[tuple[tuple[Refresh, ...], tuple[Ticket, ...]]] = []
        """Refreshes whose outcome was not known at the last look."""
        self._changed = threading.Condition()
        self._uses: deque[_Use] = deque(maxlen=_MAX_USES)
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store-refresh", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def touch(self, keys: Sequence[Key], retention: RetentionClass, *, hit: bool = True) -> None:
        """A used prefix, prefix first; `hit` False if it was computed although it was there. Never blocks."""
        with self._changed:
            self._uses.append(_Use(tuple(keys), retention, hit))
            self._changed.notify_all()

    def wait_queued(self, timeout: float) -> bool:
        """Until every use told so far has been decided and what it rewrites is queued for writing."""
        until = time.monotonic() + timeout
        with self._changed:
            while self._uses or self._busy:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return False
        return True

    def close(self) -> None:
        """Uses that wait are forgotten."""
        with self._changed:
            self._closed = True
            self._uses.clear()
            self._changed.notify_all()
        self._thread.join()

    def rewrite(self, again: Sequence[Again], epoch: int) -> tuple[Ticket, ...]:
        """Append these records again; blocks on reading them and on room in the queue. `epoch` was read before the
        rows were. One ticket per batch; an entry that could not be read is in none."""
        tickets = []
        start = 0
        size = 0
        for end in range(1, len(again) + 1):
            size += again[end - 1].row.length
            if end == len(again) or size + again[end].row.length > self._batch_bytes:
                tickets.append(self._rewrite_batch(again[start:end], epoch))
                start, size = end, 0
        return tuple(tickets)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._uses and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                use = self._uses.popleft()
                self._busy = True
            try:
                self._decide(use)
            except Exception:  # noqa: BLE001 - the boundary: one bad use must not end all refreshing (L13)
                _log.exception("a used prefix of %d entries is not refreshed", len(use.keys))
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _decide(self, use: _Use) -> None:
        epoch = self._epoch()
        # Before the index is asked: what it says of an entry that is not in flight by now is no older than its refresh.
        self._settle()
        try:
            found = self._index.get_many(use.keys, time.monotonic() + self._index_timeout_s)
        except IndexUnavailable as error:
            _log.info("a used prefix of %d entries is not refreshed: %s", len(use.keys), error)
            return
        rows = {row.key: row for row in found if row is not None and not self._covered(row)}
        self._used(list(rows.values()), hit=use.hit)
        used = [UsedEntry(row.key, row.retention, row.expires_at) for row in rows.values()]
        batch = self._refresher.plan(used, use.retention, self._wall())
        if not batch:
            return
        tickets: tuple[Ticket, ...] = ()
        try:
            tickets = self.rewrite([Again(rows[each.key], each.retention) for each in batch], epoch)
        finally:
            self._flying.append((batch, tickets))

    def _settle(self) -> None:
        """Entries may be refreshed again once their last refresh is in the index, or has failed."""
        flying = []
        for batch, tickets in self._flying:
            if all(ticket.durable.done() for ticket in tickets):
                self._refresher.done(batch)
            else:
                flying.append((batch, tickets))
        self._flying = flying

    def _rewrite_batch(self, again: Sequence[Again], epoch: int) -> Ticket:
        results = self._read([each.row for each in again], time.monotonic() + _READ_S)
        loaded = [(result, each) for result, each in zip(results, again, strict=True) if isinstance(result, Loaded)]
        try:
            return self._intake.rewrite(loaded, epoch, time.monotonic() + _QUEUE_S)
        finally:
            for result, _ in loaded:
                result.release()
