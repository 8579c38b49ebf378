"""From put_many to two servers and the index: a bounded queue, and threads that take batches from it.

A batch is entries of one collection and one time to live. It asks the master once for as many file ids, uploads its
records side by side (each volume server passes its copy on to the other one, and answers when both have it), writes the
index rows in one call, and only then are the entries durable and announced. What failed gets new file ids, elsewhere,
until the batch's time is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.kvcache.cache_events import EventSink
from headrace.kvcache.entries import EntryInfo
from headrace.kvcache.index.base import Index, IndexUnavailable
from headrace.kvcache.keys import Key
from headrace.kvcache.store.seaweedfs.cluster import Cluster, ClusterError
from headrace.kvcache.store.seaweedfs.eraser import Eraser
from headrace.kvcache.store.seaweedfs.http import Servers, ServerTimeout, ServerUnreachable
from headrace.kvcache.store.seaweedfs.known import KnownKeys
from headrace.kvcache.store.seaweedfs.needles import Needle, fill_header, header_for, new_record, row_for
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.segments.commit import stored_events
from headrace.kvcache.store.segments.counters import Counters
from headrace.kvcache.store.segments.names import Bucket
from headrace.kvcache.store.segments.pending import Ticket
from headrace.kvcache.store.segments.record import Header

_log = logging.getLogger(__name__)
_BATCHES = 2
"""Batches under way at a time: one uploads while the other waits for master and index."""
_PAUSE_S = 0.1
"""Between two tries of a batch: what died needs a moment to be noticed by the master."""


@dataclass(slots=True, eq=False)
class Pending:
    """One accepted entry."""

    info: EntryInfo
    bucket: Bucket
    collection: str
    ttl: str
    record: bytearray
    ticket: Ticket
    place: int
    """In the ticket."""
    epoch: int
    """Erasures that there were when it was accepted."""
    refresh: bool
    """Written again to live on, whatever the index says of it."""
    done: Header | None = None
    needle: Needle | None = None


class RecordWriter:
    """Thread-safe."""

    def __init__(
        self,
        settings: SeaweedSettings,
        servers: Servers,
        cluster: Cluster,
        index: Index,
        counters: Counters,
        events: EventSink,
        sequence: Callable[[], int],
        eraser: Eraser,
        known: KnownKeys,
    ) -> None:
        """`sequence` gives ever higher numbers."""
        self._settings = settings
        self._servers = servers
        self._cluster = cluster
        self._index = index
        self._counters = counters
        self._events = events
        self._sequence = sequence
        self._eraser = eraser
        self._known = known
        self._changed = threading.Condition()
        self._queue: deque[Pending] = deque()
        self._in_flight: dict[Key, Ticket] = {}
        self._bytes = 0
        self._closed = False
        self._give_up_at: float | None = None
        self._uploads = ThreadPoolExecutor(settings.writers, "seaweed-upload")
        self._threads = [
            threading.Thread(target=self._run, name=f"seaweed-write-{n}", daemon=True) for n in range(_BATCHES)
        ]
        for thread in self._threads:
            thread.start()

    def offer(
        self,
        info: EntryInfo,
        payload: bytes | memoryview,
        bucket: Bucket,
        collection: str,
        ttl: str,
        ticket: Ticket,
        place: int,
        epoch: int,
        *,
        refresh: bool = False,
    ) -> str:
        """Queue one entry; empty if it was taken, else `known` (in flight already) or `full`."""
        with self._changed:
            if self._closed:
                return "full"
            if info.key in self._in_flight:
                return "known"
            if self._bytes and self._bytes + info.length > self._settings.queue_bytes:
                return "full"
            self._in_flight[info.key] = ticket
            self._bytes += info.length
            record = new_record(payload)
            self._queue.append(Pending(info, bucket, collection, ttl, record, ticket, place, epoch, refresh))
            self._changed.notify_all()
        return ""

    def sizes(self) -> tuple[int, int]:
        """Entries and payload bytes that are accepted and not yet settled."""
        with self._changed:
            return len(self._in_flight), self._bytes

    def flush(self, timeout_s: float) -> bool:
        """Wait until what is in flight now is durable or failed."""
        until = time.monotonic() + timeout_s
        with self._changed:
            waiting = dict(self._in_flight)
            while any(self._in_flight.get(key) is ticket for key, ticket in waiting.items()):
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return False
        return True

    def close(self) -> None:
        """Write what was accepted, for as long as one batch may take, then stop."""
        with self._changed:
            self._closed = True
            self._give_up_at = time.monotonic() + self._settings.write_timeout_s
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._uploads.shutdown()

    def _run(self) -> None:
        while batch := self._take():
            try:
                self._write(batch)
            except Exception:  # noqa: BLE001
                # A bug in one batch must neither end the thread nor leave tickets open for ever (L6).
                _log.exception("a batch of %d entries was given up", len(batch))
                self._settle([pending for pending in batch if self._is_open(pending)], "internal")

    def _take(self) -> list[Pending]:
        """The next entries of one collection and time to live; empty when closed and nothing is left."""
        with self._changed:
            while not self._queue:
                if self._closed:
                    return []
                self._changed.wait()
            first = self._queue[0]
            batch: list[Pending] = []
            while self._queue and len(batch) < self._settings.batch_entries:
                pending = self._queue[0]
                if (pending.collection, pending.ttl) != (first.collection, first.ttl):
                    break
                batch.append(self._queue.popleft())
            return batch

    def _write(self, batch: list[Pending]) -> None:
        deadline = time.monotonic() + self._settings.write_timeout_s
        if self._give_up_at is not None:
            deadline = min(deadline, self._give_up_at)
        try:
            wanted = self._unknown(batch)
        except IndexUnavailable:
            # Without the index nobody would find them, and whether they are there already nobody can say.
            self._settle(batch, "index")
            return
        self._upload_all(wanted, deadline)
        self._commit([pending for pending in wanted if pending.done is not None])

    def _unknown(self, batch: Sequence[Pending]) -> list[Pending]:
        """What the index does not have with at least that life already; the rest is settled as durable."""
        rows = self._index.get_many([pending.info.key for pending in batch], self._index_deadline())
        known = [
            pending
            for pending, row in zip(batch, rows, strict=True)
            if row is not None
            and not pending.refresh
            and self._known.enough(row.retention, row.expires_at, pending.info.retention)
        ]
        self._counters.add(refused_known=len(known))
        self._known.add([row for row in rows if row is not None])
        self._settle(known, "")
        return [pending for pending in batch if pending not in known]

    def _upload_all(self, batch: Sequence[Pending], deadline: float) -> None:
        """Bring records to volumes; those that could not be brought are settled as failed."""
        left = list(batch)
        cause = "timeout"
        while left:
            left = self._without_erased(left)
            if not left:
                return
            try:
                grant = self._cluster.assign(left[0].collection, left[0].ttl, len(left), deadline)
            except ClusterError as error:
                cause = error.cause
                _log.info("SeaweedFS takes no writes: %s", error)
            else:
                numbered = list(zip(left, range(grant.first, grant.first + grant.count), strict=False))
                needles = [Needle(grant.volume, number, grant.cookie) for _, number in numbered]
                servers = [grant.server] * len(needles)
                offered = [pending for pending, _ in numbered]
                causes = list(self._uploads.map(self._upload, offered, needles, servers, [deadline] * len(needles)))
                cause = next((each for each in causes if each), cause)
                left = [pending for pending in left if pending.done is None]
            if left:
                if time.monotonic() + _PAUSE_S >= deadline:
                    self._settle(left, cause)
                    return
                time.sleep(_PAUSE_S)

    def _upload(self, pending: Pending, needle: Needle, server: str, deadline: float) -> str:
        """Bring one record to a needle; empty, or the cause of the failure."""
        if self._eraser.erased_since(pending.epoch, pending.info):
            return "dropped"
        header = header_for(pending.info, needle, pending.collection, self._sequence(), pending.bucket.end)
        fill_header(pending.record, header)
        query = "&".join(
            part for part in (f"ttl={pending.ttl}" if pending.ttl else "", "fsync=true" * self._settings.fsync) if part
        )
        path = f"{needle.path}?{query}" if query else needle.path
        try:
            reply = self._servers.call("PUT", server, path, deadline, body=pending.record)
        except ServerTimeout:
            return "timeout"
        except ServerUnreachable:
            return "not_connected"
        if reply.status not in (200, 201):
            _log.debug("%s answered %d to a write: %r", server, reply.status, reply.body[:200])
            return "server"
        pending.done, pending.needle = header, needle
        return ""

    def _commit(self, batch: Sequence[Pending]) -> None:
        """Index rows, then everybody else."""
        kept = self._without_erased(batch)
        rows = {
            pending.info.key: row_for(pending.done, pending.needle)
            for pending in kept
            if pending.done is not None and pending.needle is not None
        }
        if not rows:
            return
        try:
            self._index.put_many(list(rows.values()), self._index_deadline())
            erased = [pending for pending in kept if self._eraser.erased_since(pending.epoch, pending.info)]
            if erased:  # between the look above and the put: the erasure did not see these rows
                self._index.remove_many([rows[pending.info.key] for pending in erased], self._index_deadline())
        except IndexUnavailable as error:
            # The records are safe and a rebuild finds them; until then nobody can, so they do not count as stored.
            _log.warning("%d durable records are not in the index: %s", len(rows), error)
            self._settle(kept, "index")
            return
        self._settle(erased, "dropped")
        kept = [pending for pending in kept if pending not in erased]
        self._counters.add(
            written_bytes=sum(pending.info.length for pending in kept),
            refreshed_bytes=sum(pending.info.length for pending in kept if pending.refresh),
        )
        self._known.add([rows[pending.info.key] for pending in kept])
        for event in stored_events((pending.done, pending.bucket.name) for pending in kept if pending.done is not None):
            self._events(event)
        self._settle(kept, "")

    def _without_erased(self, batch: Sequence[Pending]) -> list[Pending]:
        """Entries that no erasure covers; the others are settled as dropped."""
        erased = [pending for pending in batch if self._eraser.erased_since(pending.epoch, pending.info)]
        self._settle(erased, "dropped")
        return [pending for pending in batch if pending not in erased]

    def _settle(self, batch: Iterable[Pending], cause: str) -> None:
        """Outcomes of entries: durable if `cause` is empty."""
        batch = list(batch)
        if cause:
            self._counters.failed(cause, len(batch))
        with self._changed:
            for pending in batch:
                self._in_flight.pop(pending.info.key, None)
                self._bytes -= pending.info.length
            self._changed.notify_all()
        for pending in batch:
            pending.ticket.settle(pending.place, not cause)

    def _is_open(self, pending: Pending) -> bool:
        with self._changed:
            return self._in_flight.get(pending.info.key) is pending.ticket

    def _index_deadline(self) -> float:
        return time.monotonic() + self._settings.index_timeout_s
