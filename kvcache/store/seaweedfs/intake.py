"""What is offered for storing: refused at once, or queued with its bucket, collection and time to live."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from headrace.kvcache.entries import EntryInfo, Loaded, RetentionClass
from headrace.kvcache.store.base import PutEntry, PutTicket, WallClock
from headrace.kvcache.store.retention.classes import Lives
from headrace.kvcache.store.seaweedfs.eraser import Eraser
from headrace.kvcache.store.seaweedfs.known import KnownKeys
from headrace.kvcache.store.seaweedfs.needles import collection_of
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.seaweedfs.ttl import FOREVER, ttl_for
from headrace.kvcache.store.seaweedfs.writer import RecordWriter
from headrace.kvcache.store.segments.counters import Counters
from headrace.kvcache.store.segments.names import Bucket
from headrace.kvcache.store.segments.pending import Ticket


class Intake:
    """Thread-safe; waits for nothing."""

    def __init__(
        self,
        settings: SeaweedSettings,
        writer: RecordWriter,
        eraser: Eraser,
        known: KnownKeys,
        lives: Lives,
        wall: WallClock,
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._eraser = eraser
        self._known = known
        self._lives = lives
        self._wall = wall
        self._counters = counters

    def put(self, entries: Sequence[PutEntry]) -> PutTicket:
        """Prefix before suffix: what is refused for want of room takes everything behind it along."""
        for entry in entries:
            if len(entry.payload) != entry.info.length:
                raise ValueError(f"payload of {len(entry.payload)} bytes, its entry says {entry.info.length}")
        ticket = Ticket(len(entries))
        accepted = []
        full = False
        epoch = self._eraser.epoch
        for place, entry in enumerate(entries):
            refused = "full" if full else "known" if self._known.has(entry.info.key, entry.info.retention) else ""
            refused = refused or self._offer(entry.info, entry.payload, ticket, place, epoch, refresh=False)
            full = full or refused == "full"
            accepted.append(not refused)
            if refused:
                self._counters.add(**{f"refused_{refused}": 1})
                ticket.settle(place, False)
        ticket.seal()
        return PutTicket(tuple(accepted), ticket.durable)

    def rewrite(self, loaded: Loaded, retention: RetentionClass, epoch: int) -> Future[tuple[bool, ...]] | None:
        """A verified record once more, with a new life; None if it is on its way already or the queue is full. `epoch`
        was read before the record's row: an erasure since then covers it."""
        ticket = Ticket(1)
        info = replace(loaded.info, retention=retention)
        if self._offer(info, loaded.payload, ticket, 0, epoch, refresh=True):
            return None
        ticket.seal()
        return ticket.durable

    def _offer(
        self, info: EntryInfo, payload: bytes | memoryview, ticket: Ticket, place: int, epoch: int, *, refresh: bool
    ) -> str:
        life = self._lives.of[info.retention]
        end = self._lives.bucket(info.retention, self._wall())
        # One time to live per class: SeaweedFS keeps a set of volumes for each that it is given.
        ttl = ttl_for(life.life_s + life.bucket_s) if end else FOREVER
        bucket = Bucket(info.namespace, info.retention, end)
        collection = collection_of(self._settings.collection, info.namespace)
        return self._writer.offer(info, payload, bucket, collection, ttl, ticket, place, epoch, refresh=refresh)
