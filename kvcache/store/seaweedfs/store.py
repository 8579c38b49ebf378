"""SeaweedStore: the store's interface over the parts of this folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait

from headrace.kvcache.cache_events import BucketDropped, EventSink, NamespaceDropped, ignore_events
from headrace.kvcache.entries import GetResult, Loaded, Miss, RetentionClass
from headrace.kvcache.index.base import Index, IndexRow, IndexUnavailable
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import (
    Capabilities,
    CapabilityMissing,
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
from headrace.kvcache.store.rebuild import Rebuilder, RebuildProgress
from headrace.kvcache.store.retention.classes import DEFAULT as DEFAULT_LIVES
from headrace.kvcache.store.retention.classes import Lives, expired
from headrace.kvcache.store.seaweedfs.census import Census
from headrace.kvcache.store.seaweedfs.cluster import Cluster, ClusterError
from headrace.kvcache.store.seaweedfs.eraser import OPERATOR_S, Eraser
from headrace.kvcache.store.seaweedfs.erasure_watch import ErasureWatch
from headrace.kvcache.store.seaweedfs.erasures import ERASED_AHEAD_NS, Erasure
from headrace.kvcache.store.seaweedfs.fetch import Fetcher
from headrace.kvcache.store.seaweedfs.http import Servers
from headrace.kvcache.store.seaweedfs.intake import Intake
from headrace.kvcache.store.seaweedfs.known import KnownKeys
from headrace.kvcache.store.seaweedfs.needles import collection_of, row_for
from headrace.kvcache.store.seaweedfs.reader import RecordReader
from headrace.kvcache.store.seaweedfs.scan import VolumeFiles, VolumeScan
from headrace.kvcache.store.seaweedfs.scrub import Scrub
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.seaweedfs.upkeep import Upkeep
from headrace.kvcache.store.seaweedfs.writer import RecordWriter
from headrace.kvcache.store.segments.counters import Counters
from headrace.kvcache.store.segments.names import ROOT, Bucket, bucket_name


class _Sequence:
    """Nanoseconds of the wall clock, strictly growing: orders records against erasures of other machines."""

    def __init__(self, wall: WallClock) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        self._last = 0

    def __call__(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, int(self._wall() * 1e9))
            return self._last


class SeaweedStore(Store):
    """Blocks and snapshots as needles of SeaweedFS."""

    def __init__(
        self,
        settings: SeaweedSettings,
        index: Index,
        *,
        files: VolumeFiles | None = None,
        lives: Lives = DEFAULT_LIVES,
        events: EventSink = ignore_events,
        wall: WallClock = time.time,
        rebuild_poll_s: float = 1.0,
    ) -> None:
        """`files` reads volumes for scans; without one a lost index cannot be refilled and `capabilities.scan` is
        False. Both are closed with the store."""
        self.capabilities = Capabilities(
            refresh=True,
            drop_tenant=True,
            drop_namespace=True,
            scan=files is not None,
            pin=True,
            quota=False,
            replicated=settings.copies > 1,
        )
        self._settings = settings
        self._index = index
        self._files = files
        self._lives = lives
        self._events = events
        self._wall = wall
        self._counters = Counters()
        self._sequence = _Sequence(wall)
        self._rebuilt_from = 0
        self._closing = threading.Lock()
        self._closed = False
        self._known = KnownKeys(lives, wall)
        self._servers = Servers(
            2 * (settings.readers + settings.writers) + 2,
            settings.connect_timeout_s,
            settings.read_attempt_s,
            settings.tls,
        )
        self._cluster = Cluster(settings, self._servers)
        self._reader = RecordReader(settings, self._servers, self._cluster)
        self._eraser = Eraser(settings, self._servers, self._cluster, index, self._known, self._counters, events)
        self._writer = RecordWriter(
            settings,
            self._servers,
            self._cluster,
            index,
            self._counters,
            events,
            self._sequence,
            self._eraser,
            self._known,
        )
        self._intake = Intake(settings, self._writer, self._eraser, self._known, lives, wall, self._counters)
        self._census = Census(settings, index, self._cluster)
        self._fetcher = Fetcher(settings, self._reader, self._intake, self._eraser, self._counters)
        self._scan = VolumeScan(settings, self._cluster, files) if files is not None else None
        self._upkeep = Upkeep(
            settings,
            self._servers,
            index,
            lives,
            self._counters,
            events,
            wall,
            self._read_again,
            self._intake.rewrite,
            lambda: self._eraser.epoch,
            ErasureWatch(self._scan, index, self._eraser, self._reader, wall) if self._scan is not None else None,
        )
        self._rebuilder = Rebuilder(
            index,
            self._rows,
            wall=wall,
            settle=self._settle_rebuild,
            poll_s=rebuild_poll_s,
            batch=settings.batch_entries * 8,
        )
        self._upkeep.start()
        if self._scan is not None:
            self._rebuilder.start()

    def put_many(self, entries: Sequence[PutEntry]) -> PutTicket:
        if self._closed:
            raise StoreError("the store is closed")
        return self._intake.put(entries)

    def lookup(self, keys: Sequence[Key], deadline: float) -> Sequence[bool]:
        if self._closed:
            return [False] * len(keys)
        rows = self._rows_of(keys, deadline)
        self._counters.miss(Miss.NOT_CONNECTED, rows.count(Miss.NOT_CONNECTED))
        return [isinstance(row, IndexRow) for row in rows]

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[GetResult]:
        if self._closed:
            return [Miss.NOT_CONNECTED] * len(keys)
        epoch = self._eraser.epoch
        return self._fetcher.fetch(self._rows_of(keys, deadline), deadline, epoch)

    def touch(self, keys: Sequence[Key], retention: RetentionClass, tenant_tag: bytes) -> None:
        if not self._closed:
            self._upkeep.touch(keys, retention)

    def find(self, keys: Sequence[Key], deadline: float) -> Sequence[StoredEntry | None]:
        rows = self._rows_of(keys, deadline)
        return [_stored_entry(row) if isinstance(row, IndexRow) else None for row in rows]

    def entries(self, deadline: float) -> Iterator[StoredEntry]:
        now = self._wall()
        try:
            for row in self._index.scan(deadline):
                if not expired(row.expires_at, now):
                    yield _stored_entry(row)
        except IndexUnavailable as error:
            raise StoreError(f"the index does not answer: {error}; try again") from error

    def _rows_of(self, keys: Sequence[Key], deadline: float) -> Sequence[IndexRow | Miss]:
        """What the index says, or why there is nothing to read; misses everywhere while it does not answer (L17)."""
        try:
            rows = self._index.get_many(keys, deadline)
        except IndexUnavailable:
            return [Miss.NOT_CONNECTED] * len(keys)
        now = self._wall()
        found: list[IndexRow | Miss] = []
        for key, row in zip(keys, rows, strict=True):
            if row is not None and not expired(row.expires_at, now):
                found.append(row)
                continue
            found.append(Miss.ABSENT if row is None else Miss.EXPIRED)
            self._known.discard([key])
        return found

    def _read_again(self, row: IndexRow, deadline: float) -> Loaded | None:
        result = self._reader.read(row, deadline).result
        return result if isinstance(result, Loaded) else None

    def scan(self) -> Iterator[ScannedEntry]:
        now = self._wall()
        for found in self._scanner().records():
            header = found.header
            if not expired(header.expires_at, now):
                bucket = Bucket(header.info.namespace, header.info.retention, header.expires_at)
                yield ScannedEntry(header.info, header.expires_at or float("inf"), bucket.name)

    def drop_bucket(self, bucket: str) -> DropCount:
        dropped = self._eraser.drop(lambda group: bucket_name(group) == bucket, delete=True)
        self._events(BucketDropped(bucket))
        return dropped

    def drop_namespace(self, namespace: bytes) -> DropCount:
        self._eraser.erase(Erasure(self._sequence() + ERASED_AHEAD_NS, namespace=namespace))
        prefix = f"{ROOT}/{namespace.hex()}/"
        dropped = self._eraser.drop(lambda group: group.startswith(prefix), delete=False)
        try:
            collection = collection_of(self._settings.collection, namespace)
            self._cluster.delete_collection(collection, time.monotonic() + OPERATOR_S)
        except ClusterError as error:
            raise StoreError(
                f"unreadable from now on, but its volumes are not deleted: {error}; drop it again"
            ) from error
        self._events(NamespaceDropped(namespace))
        return dropped

    def drop_tenant(self, tenant_tag: bytes) -> DropCount:
        self._eraser.erase(Erasure(self._sequence() + ERASED_AHEAD_NS, tenant_tag=tenant_tag))
        return self._eraser.drop(lambda group: True, lambda row: row.tenant_tag == tenant_tag, delete=True)

    def pin(self, keys: Sequence[Key]) -> int:
        deadline = time.monotonic() + OPERATOR_S
        epoch = self._eraser.epoch
        rows = self._rows_of(keys, deadline)
        kept = sum(isinstance(row, IndexRow) and row.expires_at == 0 for row in rows)
        loaded = [self._read_again(row, deadline) for row in rows if isinstance(row, IndexRow) and row.expires_at]
        writes = [self._intake.rewrite(each, RetentionClass.PINNED, epoch) for each in loaded if each is not None]
        done = wait([write for write in writes if write is not None], max(0.0, deadline - time.monotonic())).done
        return kept + sum(write.result()[0] for write in done)

    def collect(self) -> CollectReport:
        return self._upkeep.collect()

    def verify(self, progress: Callable[[int], None] = lambda done: None) -> VerifyReport:
        scrub = Scrub(self._settings, self._index, self._reader, self._scan, self._wall, progress)
        try:
            return scrub.run()
        except IndexUnavailable as error:
            raise StoreError(f"the index does not answer: {error}; verify again when it does") from error

    def stats(self) -> StoreStats:
        value = self._counters.value
        queued, queued_bytes = self._writer.sizes()
        sizes = self._census.sizes()
        return StoreStats(
            blocks=sizes.blocks,
            snapshots=sizes.snapshots,
            payload_bytes=sizes.payload_bytes,
            disk_bytes=sizes.disk_bytes,
            index_bytes=sizes.index_bytes,
            hits=value("hits"),
            misses=self._counters.misses(),
            read_bytes=value("read_bytes"),
            written_bytes=value("written_bytes"),
            refreshed_bytes=value("refreshed_bytes"),
            expired_entries=value("expired_entries"),
            refused_full=value("refused_full"),
            refused_known=value("refused_known"),
            failed_writes=self._counters.failures(),
            queued_entries=queued,
            queued_bytes=queued_bytes,
            quarantined=value("quarantined"),
            buckets=sizes.buckets,
            segments=sizes.volumes,
        )

    def identity(self) -> str:
        """The index's generation: stores that share volumes share an index."""
        try:
            return self._index.generation(time.monotonic() + self._settings.index_timeout_s)
        except IndexUnavailable:
            return ""

    @property
    def rebuild(self) -> RebuildProgress:
        """How a lost index is coming back."""
        return self._rebuilder.progress

    def integrity(self) -> tuple[str, ...]:
        """What is not zero and should be when nobody reads or writes (L11); for idle moments, after a flush."""
        queued, queued_bytes = self._writer.sizes()
        counts = {
            "bytes of payloads not released": self._fetcher.budget.taken,
            "entries in flight": queued,
            "bytes in flight": queued_bytes,
            "entries being refreshed": self._upkeep.refreshing,
        }
        return tuple(f"{count} {what}" for what, count in counts.items() if count)

    def flush(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        return self._upkeep.settle_touches(timeout_s) and self._writer.flush(until - time.monotonic())

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._rebuilder.close()
        self._upkeep.close()
        self._writer.close()
        self._fetcher.close()
        if self._files is not None:
            self._files.close()
        self._servers.close()
        self._index.close()

    def _scanner(self) -> VolumeScan:
        if self._scan is None:
            raise CapabilityMissing("this SeaweedFS store was opened without a VolumeFiles and cannot list its volumes")
        return self._scan

    def _rows(self) -> Iterator[IndexRow]:
        self._rebuilt_from = self._sequence()
        for found in self._scanner().records():
            yield row_for(found.header, found.needle)

    def _settle_rebuild(self) -> None:
        """What other machines erased while a rebuild read records must not come back with it."""
        self._eraser.erase_rows(
            [erasure for erasure in self._scanner().erasures() if erasure.until > self._rebuilt_from]
        )


def _stored_entry(row: IndexRow) -> StoredEntry:
    return StoredEntry(
        key=row.key,
        kind=row.kind,
        tokens=row.tokens,
        length=row.length,
        retention=row.retention,
        tenant_tag=row.tenant_tag,
        expires_at=row.expires_at or float("inf"),
        bucket=bucket_name(row.group),
    )
