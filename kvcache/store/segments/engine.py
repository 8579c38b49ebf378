"""The Store over segment files and an index."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from headrace.kvcache.cache_events import EventSink, ignore_events
from headrace.kvcache.entries import GetResult, Miss, RetentionClass
from headrace.kvcache.index.base import Index, IndexRow, IndexStats, IndexUnavailable
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import (
    Capabilities,
    CollectReport,
    DropCount,
    PutEntry,
    PutTicket,
    ScannedEntry,
    Store,
    StoredEntry,
    StoreError,
    StoreStats,
    VerifyReport,
    WallClock,
)
from headrace.kvcache.store.files import FileLayer
from headrace.kvcache.store.rebuild import RebuildProgress
from headrace.kvcache.store.retention.classes import DEFAULT, Lives, expired
from headrace.kvcache.store.segments.intake import Again
from headrace.kvcache.store.segments.parts import Parts
from headrace.kvcache.store.segments.reader import SegmentReader
from headrace.kvcache.store.segments.scrub import Scrub
from headrace.kvcache.store.segments.settings import Liveness, SegmentSettings
from headrace.kvcache.store.segments.table import SegmentTable

_log = logging.getLogger(__name__)
_PIN_S = 60.0
_RECOUNTED_ROWS = 10_000
"""An index of so many rows is read in some 20 ms."""


class SegmentStore(Store):
    """See store/base.py. `files` is the store's directory; every process that shares it has its own `settings.boot`."""

    capabilities = Capabilities(
        refresh=True, drop_tenant=True, drop_namespace=True, scan=True, pin=True, quota=True, replicated=False
    )

    def __init__(
        self,
        files: FileLayer,
        index: Index,
        settings: SegmentSettings,
        *,
        lives: Lives = DEFAULT,
        events: EventSink = ignore_events,
        wall: WallClock = time.time,
        liveness: Liveness | None = None,
    ) -> None:
        """Open the directory; `index` is closed with the store.

        liveness       whether a writer runs, beside its lock file (a registry lease; needed where several hosts share
                       a file system whose flock does not reach across them)

        Raises OSError if the directory cannot be used, StoreError if another living process has this boot id.
        """
        self._parts = Parts(files, index, settings, lives, events, wall, liveness)
        self._closed = False
        self._parts.start()

    @property
    def reader(self) -> SegmentReader:
        """Reads by index rows, beside the index: for measurements."""
        return self._parts.reader

    @property
    def table(self) -> SegmentTable:
        """Sizes of segments and tenants, as this process knows them."""
        return self._parts.table

    def put_many(self, entries: Sequence[PutEntry]) -> PutTicket:
        if self._closed:
            refused: Future[tuple[bool, ...]] = Future()
            refused.set_result((False,) * len(entries))
            return PutTicket((False,) * len(entries), refused)
        return self._parts.intake.put(entries)

    def lookup(self, keys: Sequence[Key], deadline: float) -> Sequence[bool]:
        return [False] * len(keys) if self._closed else self._parts.reads.lookup(keys, deadline)

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[GetResult]:
        return [Miss.NOT_CONNECTED] * len(keys) if self._closed else self._parts.reads.get_many(keys, deadline)

    def touch(self, keys: Sequence[Key], retention: RetentionClass, tenant_tag: bytes) -> None:
        if not self._closed:
            self._parts.rewriter.touch(keys, retention)

    def find(self, keys: Sequence[Key], deadline: float) -> Sequence[StoredEntry | None]:
        return self._parts.reads.find(keys, deadline)

    def entries(self, deadline: float) -> Iterator[StoredEntry]:
        return self._parts.reads.entries(deadline)

    def scan(self) -> Iterator[ScannedEntry]:
        return self._parts.records.entries()

    def drop_bucket(self, bucket: str) -> DropCount:
        return self._parts.erasing.drop_bucket(bucket)

    def drop_namespace(self, namespace: bytes) -> DropCount:
        return self._parts.erasing.drop_namespace(namespace)

    def drop_tenant(self, tenant_tag: bytes) -> DropCount:
        return self._parts.erasing.drop_tenant(tenant_tag)

    def pin(self, keys: Sequence[Key]) -> int:
        epoch = self._parts.epochs.now
        rows = [row for row in self._parts.reads.rows(keys, self._deadline()) if isinstance(row, IndexRow)]
        loose = [row for row in rows if row.retention is not RetentionClass.PINNED]
        until = time.monotonic() + _PIN_S
        kept = len(rows) - len(loose)
        for ticket in self._parts.rewriter.rewrite([Again(row, RetentionClass.PINNED) for row in loose], epoch):
            try:
                kept += sum(ticket.durable.result(timeout=max(0.0, until - time.monotonic())))
            except TimeoutError as error:
                raise StoreError(
                    f"{kept} of {len(keys)} are kept, the others were not durable within {_PIN_S:.0f} s: the disk "
                    "or the index is slow; pin again"
                ) from error
        return kept

    def collect(self) -> CollectReport:
        try:
            return self._parts.sweeper.pass_now()
        except (OSError, IndexUnavailable) as error:
            return CollectReport(refused=f"the sweep broke off ({error}); it goes on by itself, or try again")

    def verify(self, progress: Callable[[int], None] = lambda done: None) -> VerifyReport:
        scrub = Scrub(
            self._parts.files,
            self._parts.index,
            direct=self._parts.direct,
            skipped=lambda found: expired(found.name.bucket.end, self._parts.wall()),
            covered=self._parts.erasures.covers,
            progress=progress,
        )
        try:
            report = scrub.run()
        except (OSError, IndexUnavailable) as error:
            raise StoreError(f"the scrub broke off: {error}; try again") from error
        known = {row.key for row in scrub.dangling}
        self._parts.counters.add(quarantined=sum(miss is Miss.DIGEST and key in known for key, miss in report.bad))
        self._parts.reads.forget(scrub.dangling)
        return report

    def stats(self) -> StoreStats:
        index = self._index_stats()
        self._recount(index)
        blocks, snapshots, payload, disk, segments, buckets = self._parts.table.totals()
        queued, queued_bytes = self._parts.entries.sizes()
        value = self._parts.counters.value
        return StoreStats(
            blocks=blocks,
            snapshots=snapshots,
            payload_bytes=payload,
            disk_bytes=disk,
            capacity_bytes=self._parts.settings.capacity_bytes,
            index_bytes=0 if index is None else index.nbytes,
            hits=value("hits"),
            misses=self._parts.counters.misses(),
            read_bytes=value("read_bytes"),
            written_bytes=value("written_bytes"),
            refreshed_bytes=value("refreshed_bytes"),
            evicted_entries=value("evicted_entries"),
            expired_entries=value("expired_entries"),
            refused_full=value("refused_full"),
            refused_quota=value("refused_quota"),
            refused_known=value("refused_known"),
            failed_writes=self._parts.counters.failures(),
            queued_entries=queued,
            queued_bytes=queued_bytes,
            quarantined=value("quarantined"),
            buckets=buckets,
            segments=segments,
            sweeper=self._parts.sweeper.elected,
            direct_io=self._parts.direct,
        )

    def identity(self) -> str:
        """The index's generation: stores that share files share an index."""
        try:
            return self._parts.index.generation(self._deadline())
        except IndexUnavailable:
            return ""

    def integrity(self) -> tuple[str, ...]:
        """What is not zero and should be when nobody reads or writes (L11); for idle moments, after a flush."""
        parts = self._parts
        counts = {
            "bytes of read buffers taken": parts.read_buffers.taken,
            "bytes of staging buffers taken": parts.staging.taken,
            "keys in flight": parts.entries.in_flight,
            "segments pinned by readers": parts.handles.readers(),
        }
        return tuple(f"{count} {what}" for what, count in counts.items() if count)

    def flush(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        queued = self._parts.rewriter.wait_queued(timeout_s)
        return self._parts.entries.wait_settled(until - time.monotonic()) and queued

    @property
    def rebuild(self) -> RebuildProgress:
        """How a lost index is coming back."""
        return self._parts.rebuilder.progress

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._parts.close()

    def _index_stats(self) -> IndexStats | None:
        try:
            return self._parts.index.stats(self._deadline())
        except IndexUnavailable:
            return None

    def _recount(self, index: IndexStats | None) -> None:
        """What others wrote and removed is known from sweeps, to the sweeper alone; a small index is read at once."""
        blocks, snapshots, *_ = self._parts.table.totals()
        if index is None or index.entries == blocks + snapshots or index.entries > _RECOUNTED_ROWS:
            return
        try:
            self._parts.load_table()
        except (OSError, IndexUnavailable) as error:
            _log.debug("the sizes of the store are those of the last sweep: %s", error)

    def _deadline(self) -> float:
        return time.monotonic() + self._parts.settings.index_timeout_s
