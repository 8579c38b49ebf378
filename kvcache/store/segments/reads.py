"""lookup, find, get_many: the index, what may be shown of it, the disk, and the accounts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from headrace.kvcache.cache_events import EventSink, Removed, Tier
from headrace.kvcache.entries import EntryKind, GetResult, Loaded, Miss
from headrace.kvcache.index.base import Index, IndexRow, IndexUnavailable
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import DropCount, StoredEntry, StoreError, WallClock
from headrace.kvcache.store.files import miss_of
from headrace.kvcache.store.retention.classes import NEVER, expired
from headrace.kvcache.store.segments.counters import Counters
from headrace.kvcache.store.segments.erasures import Erasures
from headrace.kvcache.store.segments.names import bucket_name
from headrace.kvcache.store.segments.reader import SegmentReader
from headrace.kvcache.store.segments.table import SegmentTable, take_out

_log = logging.getLogger(__name__)
_DEAD = frozenset({Miss.ABSENT, Miss.HEADER, Miss.HOLE, Miss.SHORT, Miss.DIGEST, Miss.DROPPED})
"""Misses that say something of the record, not of the moment: its row goes, so that it costs one verified miss."""


class Reads:
    """Thread-safe."""

    def __init__(
        self,
        index: Index,
        reader: SegmentReader,
        erasures: Erasures,
        table: SegmentTable,
        counters: Counters,
        events: EventSink,
        wall: WallClock,
        index_timeout_s: float,
        unavailable: Callable[[], None],
        *,
        names_lag: bool,
    ) -> None:
        """`unavailable` is told when the index does not answer; `names_lag` as the file layer says it."""
        self._index = index
        self._reader = reader
        self._erasures = erasures
        self._table = table
        self._counters = counters
        self._events = events
        self._wall = wall
        self._index_timeout_s = index_timeout_s
        self._unavailable = unavailable
        # A mount may deny a segment that another host has just made and told the index of: its rows stay.
        self._dead = _DEAD - {Miss.ABSENT} if names_lag else _DEAD

    def rows(self, keys: Sequence[Key], deadline: float) -> list[IndexRow | Miss]:
        """What may be shown: unexpired rows of records that were not erased, or why not."""
        try:
            found = self._index.get_many(keys, deadline)
        except IndexUnavailable:
            self._unavailable()
            return [Miss.NOT_CONNECTED] * len(keys)
        now = self._wall()
        out: list[IndexRow | Miss] = []
        for row in found:
            if row is None:
                out.append(Miss.ABSENT)
            elif expired(row.expires_at, now):
                out.append(Miss.EXPIRED)
            elif self._erasures.covers(row.group, row.tenant_tag):
                out.append(Miss.DROPPED)
            else:
                out.append(row)
        return out

    def lookup(self, keys: Sequence[Key], deadline: float) -> Sequence[bool]:
        rows = self.rows(keys, deadline)
        self._counters.miss(Miss.NOT_CONNECTED, rows.count(Miss.NOT_CONNECTED))
        return [isinstance(row, IndexRow) for row in rows]

    def find(self, keys: Sequence[Key], deadline: float) -> Sequence[StoredEntry | None]:
        return [stored_entry(row) if isinstance(row, IndexRow) else None for row in self.rows(keys, deadline)]

    def entries(self, deadline: float) -> Iterator[StoredEntry]:
        now = self._wall()
        try:
            for row in self._index.scan(deadline):
                if not expired(row.expires_at, now) and not self._erasures.covers(row.group, row.tenant_tag):
                    yield stored_entry(row)
        except IndexUnavailable as error:
            raise StoreError(f"the index does not answer: {error}; try again") from error

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[GetResult]:
        results: list[GetResult] = [Miss.ABSENT] * len(keys)
        places: list[int] = []
        wanted: list[IndexRow] = []
        for place, row in enumerate(self.rows(keys, deadline)):
            if isinstance(row, Miss):
                results[place] = row
            else:
                places.append(place)
                wanted.append(row)
        for place, result in zip(places, self.read(wanted, deadline), strict=True):
            results[place] = result
        self._account(results)
        return results

    def read(self, rows: Sequence[IndexRow], deadline: float) -> list[GetResult]:
        """Verified payloads of these records. What another process erased since it wrote is not among them."""
        if not rows:
            return []
        try:
            self._erasures.refresh({row.group for row in rows}, deadline)
        except OSError as error:
            _log.warning("the log of erasures cannot be read, so nothing may be shown: %s", error)
            return [miss_of(error)] * len(rows)
        results = self._reader.read(rows, deadline)
        dead = []
        for place, (row, result) in enumerate(zip(rows, results, strict=True)):
            if self._erasures.covers(row.group, row.tenant_tag):
                if isinstance(result, Loaded):
                    result.release()
                results[place] = result = Miss.DROPPED
            if isinstance(result, Miss) and result in self._dead:
                dead.append(row)
                if result is Miss.DIGEST:
                    _log.error("a record of %s has other bytes than were written; it is not read again", row.group)
                    self._counters.add(quarantined=1)
        if dead:
            self.forget(dead)
        return results

    def forget(self, rows: Sequence[IndexRow]) -> None:
        """Rows that lead nowhere. One that was stale goes from the table alone: its entry lies elsewhere."""
        try:
            lost = take_out(self._index, self._table, rows, time.monotonic() + self._index_timeout_s)
        except IndexUnavailable as error:
            _log.info("%d dangling rows stay for now: %s", len(rows), error)
            return
        self.removed(lost)

    def removed(self, rows: Sequence[IndexRow]) -> DropCount:
        """The index has them no more: tell it."""
        self._table.remove(rows)
        counts = {}
        for kind in EntryKind:
            keys = tuple(row.key for row in rows if row.kind is kind)
            counts[kind] = len(keys)
            if keys:
                self._events(Removed(kind, Tier.STORE, keys))
        return DropCount(counts[EntryKind.BLOCK], counts[EntryKind.SNAPSHOT])

    def _account(self, results: Sequence[GetResult]) -> None:
        sizes = [result.info.length for result in results if isinstance(result, Loaded)]
        self._counters.add(hits=len(sizes), read_bytes=sum(sizes))
        for result in results:
            if isinstance(result, Miss):
                self._counters.miss(result)


def stored_entry(row: IndexRow) -> StoredEntry:
    """A row as operators see it."""
    expires_at = float("inf") if row.expires_at == NEVER else float(row.expires_at)
    return StoredEntry(
        row.key, row.kind, row.tokens, row.length, row.retention, row.tenant_tag, expires_at, bucket_name(row.group)
    )
