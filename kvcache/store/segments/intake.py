"""put_many: what is accepted, copied once into the form it will have on disk, and queued."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from headrace.kvcache.entries import EntryInfo, Loaded, RetentionClass
from headrace.kvcache.index.base import Index, IndexRow, IndexUnavailable
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import PutEntry, PutTicket, WallClock
from headrace.kvcache.store.retention.classes import expired
from headrace.kvcache.store.segments.buffers import Buffer, BufferPool
from headrace.kvcache.store.segments.copies import fill
from headrace.kvcache.store.segments.counters import Counters
from headrace.kvcache.store.segments.names import Bucket
from headrace.kvcache.store.segments.pending import Pending, Ticket, WriteQueue
from headrace.kvcache.store.segments.record import record_bytes
from headrace.kvcache.store.segments.settings import ExpiryBuckets

_log = logging.getLogger(__name__)

_FIRST = 16
"""Records of a put that are handed to the writer before the others: about one pwritev of blocks."""

Room = Callable[[bytes], float]
"""Record bytes that a tenant, by its tag, may add now."""


@dataclass(frozen=True, slots=True)
class Again:
    """A record to append again."""

    row: IndexRow
    retention: RetentionClass
    end: int | None = None
    """Its expiry bucket; None: the one of now."""


class Intake:
    """Thread-safe. Never blocks on the disk; asks the index at most `index_timeout_s`."""

    def __init__(
        self,
        entries: WriteQueue,
        buffers: BufferPool,
        index: Index,
        counters: Counters,
        buckets: ExpiryBuckets,
        wall: WallClock,
        epoch: Callable[[], int],
        learn: Callable[[Collection[bytes]], None],
        room: Room,
        covered: Callable[[IndexRow], bool],
        known_again: Callable[[Sequence[Key], RetentionClass], None],
        index_timeout_s: float,
    ) -> None:
        """`learn`: look at what was erased in these namespaces, so that only a later erasure counts as one. `covered`:
        whether a row's record was erased. `known_again` is told of entries that are offered although they are there:
        somebody used what they hold."""
        self._entries = entries
        self._buffers = buffers
        self._index = index
        self._counters = counters
        self._buckets = buckets
        self._wall = wall
        self._epoch = epoch
        self._learn = learn
        self._room = room
        self._covered = covered
        self._known_again = known_again
        self._index_timeout_s = index_timeout_s

    def put(self, entries: Sequence[PutEntry]) -> PutTicket:
        """Prefix before suffix: what is refused for want of room takes everything behind it along, since a suffix
        without its prefix is of no use."""
        for entry in entries:
            if len(entry.payload) != entry.info.length:
                raise ValueError(f"payload of {len(entry.payload)} bytes, its entry says {entry.info.length}")
        ticket = Ticket(len(entries))
        self._learn({entry.info.namespace for entry in entries})
        epoch, now = self._epoch(), self._wall()
        places = self._new_ones(entries, now)
        buffers = self._buffers.take_now(record_bytes(entries[place].info.length) for place in places)
        taken, refused = places[: len(buffers)], places[len(buffers) :]
        if refused:
            self._entries.release([entries[place].info.key for place in refused])
            self._counters.add(refused_full=len(refused))
        # The disk has work while the rest is copied.
        for part in (slice(0, _FIRST), slice(_FIRST, None)):
            if buffers[part]:
                self._accept(entries, taken[part], buffers[part], ticket, epoch, now)
        accepted = [False] * len(entries)
        for place in taken:
            accepted[place] = True
        ticket.settle_many([place for place, is_taken in enumerate(accepted) if not is_taken], False)
        ticket.seal()
        return PutTicket(tuple(accepted), ticket.durable)

    def _accept(
        self,
        entries: Sequence[PutEntry],
        places: Sequence[int],
        buffers: Sequence[Buffer],
        ticket: Ticket,
        epoch: int,
        now: float,
    ) -> None:
        """Copy the entries at these places and queue them."""
        fill(buffers, [entries[place].payload for place in places])
        buckets: dict[tuple[bytes, RetentionClass], Bucket] = {}
        ready: list[Pending] = []
        for place, buffer in zip(places, buffers, strict=True):
            info = entries[place].info
            of = info.namespace, info.retention
            bucket = buckets.get(of)
            if bucket is None:
                bucket = buckets[of] = Bucket(*of, self._buckets.bucket(info.retention, now))
            ready.append(Pending(info, bucket, buffer, buffer.size, ticket, place, None, epoch))
        self._entries.add(ready)

    def _new_ones(self, entries: Sequence[PutEntry], now: float) -> list[int]:
        """Places of the entries that are to be written; their keys are claimed. Counts why the others are not."""
        known = self._known(entries, now)
        self._counters.failed("index", known.count(None))
        again: dict[RetentionClass, list[Key]] = {}
        for entry, there in zip(entries, known, strict=True):
            if there:
                again.setdefault(entry.info.retention, []).append(entry.info.key)
        for retention, keys in again.items():
            self._known_again(keys, retention)
        offered = [place for place, there in enumerate(known) if there is False]
        claims = self._entries.claim([entries[place].info.key for place in offered])
        claimed = [place for place, free in zip(offered, claims, strict=True) if free]
        self._counters.add(refused_known=known.count(True) + len(offered) - len(claimed))
        within = self._within_quota([entries[place].info for place in claimed])
        if within < len(claimed):
            self._entries.release([entries[place].info.key for place in claimed[within:]])
            self._counters.add(refused_quota=1, refused_full=len(claimed) - within - 1)
        return claimed[:within]

    def _within_quota(self, infos: Sequence[EntryInfo]) -> int:
        """How many of them, from the first, their tenants may add."""
        room: dict[bytes, float] = {}
        for number, info in enumerate(infos):
            tenant = info.tenant_tag
            left = room[tenant] if tenant in room else self._room(tenant)
            room[tenant] = left - record_bytes(info.length)
            if room[tenant] < 0:
                return number
        return len(infos)

    def rewrite(self, loaded: Sequence[tuple[Loaded, Again]], epoch: int, deadline: float) -> Ticket:
        """Append entries again, waiting until `deadline` for room in the queue. For background threads. `epoch` was
        read before the rows were; the caller still owns `loaded`."""
        ticket = Ticket(len(loaded))
        now = self._wall()
        for place, (entry, again) in enumerate(loaded):
            info = replace(entry.info, retention=again.retention)
            end = again.end if again.end is not None else self._buckets.bucket(info.retention, now)
            (taken,) = self._entries.claim((info.key,))
            if taken:
                buffer = self._buffers.take(record_bytes(info.length), deadline)
                if buffer is None:
                    self._entries.release((info.key,))
                    self._counters.add(refused_full=1)
                    taken = False
                else:
                    fill([buffer], [entry.payload])
                    bucket = Bucket(info.namespace, info.retention, end)
                    self._entries.add([Pending(info, bucket, buffer, buffer.size, ticket, place, again.row, epoch)])
            if not taken:
                ticket.settle(place, False)
        ticket.seal()
        return ticket

    def _known(self, entries: Sequence[PutEntry], now: float) -> list[bool | None]:
        """Which entries the index has unexpired; None where it cannot be asked: what cannot be found again is not
        written (L17, decided once for all of them)."""
        try:
            rows = self._index.get_many([entry.info.key for entry in entries], time.monotonic() + self._index_timeout_s)
        except IndexUnavailable as error:
            _log.warning("%d entries are not stored, the index does not answer: %s", len(entries), error)
            return [None] * len(entries)
        return [row is not None and not expired(row.expires_at, now) and not self._covered(row) for row in rows]
