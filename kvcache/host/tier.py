"""The host tier of one worker process: entries in one stretch of registered host memory.

Thread-safe. One lock guards the books and is held for dictionary operations, and for the copies that make an empty slab
(at most a slab's bytes); payloads are copied in and digests checked outside it, under a pin. Events are said under the
lock, so that their order is the order of what happened.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.kvcache.cache_events import Cleared, EventSink, Removed, Stored, Tier, ignore_events
from headrace.kvcache.entries import EntryInfo, EntryKind, GetResult, Loaded, Miss, payload_digest
from headrace.kvcache.host.arena import ArenaShape, HostTierError
from headrace.kvcache.host.books import Books
from headrace.kvcache.host.types import HostIntegrity, HostStats, Pinned
from headrace.kvcache.keys import Key


@dataclass(eq=False)
class _Counts:
    """Since start."""

    stored: int = 0
    stored_bytes: int = 0
    known: int = 0
    no_room: int = 0
    hits: int = 0
    read_bytes: int = 0
    bad: int = 0
    misses: Counter[Miss] = field(default_factory=Counter)


class HostTier:
    """A TierSource (entries.py) named `host`. The memory has to outlive the last pin."""

    name = "host"

    def __init__(
        self,
        memory: memoryview,
        shape: ArenaShape,
        *,
        events: EventSink = ignore_events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """memory: writable, contiguous, shape.total_bytes (kvcache/memory.py: host_slabs). events: called under the
        tier's lock; it must neither block nor call the tier. clock: of the deadlines.

        Raises HostTierError when memory and shape differ.
        """
        if memory.readonly or not memory.contiguous or memory.nbytes != shape.total_bytes:
            raise HostTierError(f"host memory of {memory.nbytes} bytes, {shape.total_bytes} writable bytes are needed")
        self.shape = shape
        # An empty view cannot be cast; a tier without memory has no slab to touch.
        self._view = memory.cast("B") if shape.slabs else memoryview(bytearray())
        self._bytes = np.frombuffer(self._view, dtype=np.uint8)
        self._events = events
        self._clock = clock
        self._lock = threading.Lock()
        self._books = Books(self._bytes, shape, self._say_removed)
        self._counts = _Counts()

    # --- writing -------------------------------------------------------------------------------------------------

    def put(self, info: EntryInfo, payload: bytes | bytearray | memoryview) -> bool:
        """Copy an entry in. True when it is there now, newly or as before; False when no room could be made (everything
        is pinned, or the tier has no memory), or it was dropped while it was copied.

        Raises HostTierError when the payload is not of the kind's size in this layout. The digest is taken on trust: it
        is verified when the entry is read (L3).
        """
        data = np.frombuffer(payload, dtype=np.uint8)
        if not data.size == info.length == self.shape.entry_bytes(info.kind):
            raise HostTierError(
                f"{info.kind.name.lower()} of {data.size} bytes described as {info.length}: this layout's have "
                f"{self.shape.entry_bytes(info.kind)}"
            )
        with self._lock:
            if info.key in self._books.held or info.key in self._books.filling:
                self._counts.known += 1
                return True
            page = self._books.begin(info)
            if page is None:
                self._counts.no_room += 1
                return False
            pin = self._books.pin(page)
        try:
            np.copyto(self._bytes[page.offset : page.offset + info.length], data)
        except BaseException:
            page.gone = True
            raise
        finally:
            with self._lock:
                kept = self._books.filled(page)
                if kept:
                    self._counts.stored += 1
                    self._counts.stored_bytes += info.length
                    parent = info.parent if info.kind is EntryKind.BLOCK else None
                    self._events(Stored(info.kind, Tier.HOST, (info.key,), parent, info.tokens, info.length))
                self._books.unpin(pin)
        return kept

    def wants(self, key: Key) -> bool:
        """Whether a put of this key would copy anything; for callers to whom reading the payload is dear."""
        with self._lock:
            return key not in self._books.held and key not in self._books.filling and self.shape.slabs > 0

    def touch(self, keys: Sequence[Key]) -> None:
        """A request used this prefix, wherever it was read from: counts for eviction, once per request. Keys that are
        not here are passed over.

        All of a prefix's entries count alike, so their order is no matter to S3-FIFO; that a suffix leaves before its
        prefix is seen to when it leaves (lineage.py)."""
        with self._lock:
            for key in keys:
                if key in self._books.held:
                    self._books.policy.hit(key)

    # --- reading -------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[Key], deadline: float) -> Sequence[bool]:
        """Which keys are there now. Takes microseconds; the deadline is not looked at."""
        with self._lock:
            return [key in self._books.held for key in keys]

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[GetResult]:
        """Views of the verified payloads, pinned until released; misses ABSENT, DIGEST (dropped, counted), TIMEOUT."""
        return [self._get(key, deadline) for key in keys]

    def _get(self, key: Key, deadline: float) -> GetResult:
        if self._clock() >= deadline:
            return self._miss(Miss.TIMEOUT)
        pinned = self.pin(key)
        if pinned is None:
            return self._miss(Miss.ABSENT)
        info = pinned.info
        payload = self._view[pinned.offset : pinned.offset + info.length].toreadonly()
        if payload_digest(payload) != info.digest:
            self.drop_bad(pinned)
            self.unpin(pinned.pin)
            return self._miss(Miss.DIGEST)
        with self._lock:
            self._counts.hits += 1
            self._counts.read_bytes += info.length
        return Loaded(info, payload, lambda: self.unpin(pinned.pin))

    def pin(self, key: Key) -> Pinned | None:
        """Keep an entry's bytes in place until `unpin`; None when it is not there. Nothing is verified: for readers
        that verify what they got (peers' leases)."""
        with self._lock:
            page = self._books.held.get(key)
            if page is None:
                return None
            return Pinned(page.info, self._books.pin(page), page.offset, page.generation)

    def unpin(self, pin: int) -> None:
        """Exactly once per pin (L7). Raises HostTierError for a pin that has ended."""
        with self._lock:
            self._books.unpin(pin)

    def drop_bad(self, pinned: Pinned) -> bool:
        """The bytes of a pinned entry do not have its digest: forget it (L3). True unless it was forgotten before."""
        with self._lock:
            page = self._books.pins[pinned.pin]
            if page.gone:
                return False
            self._counts.bad += 1
            self._books.drop(page)
            return True

    # --- dropping ------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[Key]) -> int:
        """Forget entries; returns how many were there."""
        wanted = set(keys)
        with self._lock:
            return self._books.drop_where(lambda info: info.key in wanted)

    def drop_namespace(self, namespace: bytes) -> int:
        """Forget a model's entries; returns how many there were."""
        with self._lock:
            return self._books.drop_where(lambda info: info.namespace == namespace)

    def drop_tenant(self, tenant_tag: bytes) -> int:
        """Erase a tenant's entries: bytes too, those still pinned with their last pin. Returns how many there were."""
        with self._lock:
            return self._books.drop_where(lambda info: info.tenant_tag == tenant_tag, erase=True)

    def clear(self) -> int:
        """Forget everything, what was evicted lately too; returns how many entries there were."""
        with self._lock:
            count = self._books.drop_where(lambda _: True, tell=False)
            self._books.policy.clear()
            self._events(Cleared(Tier.HOST))
            return count

    # --- whole ---------------------------------------------------------------------------------------------------

    def stats(self) -> HostStats:
        with self._lock:
            books, counts = self._books, self._counts
            return HostStats(
                capacity_bytes=self.shape.total_bytes,
                blocks=len(books.held) - len(books.snapshots),
                snapshots=len(books.snapshots),
                payload_bytes=books.policy.bytes,
                pins=len(books.pins),
                pinned_entries=len({page for page in books.pins.values() if not page.gone}),
                draining_entries=len(books.draining),
                ghosts=books.policy.ghosts,
                stored=counts.stored,
                stored_bytes=counts.stored_bytes,
                known=counts.known,
                no_room=counts.no_room,
                hits=counts.hits,
                read_bytes=counts.read_bytes,
                misses=dict(counts.misses),
                evicted_blocks=books.evicted[EntryKind.BLOCK],
                evicted_snapshots=books.evicted[EntryKind.SNAPSHOT],
                moved=books.moved,
                bad=counts.bad,
            )

    def integrity(self) -> HostIntegrity:
        """Check that units, entries, pins, policy and lineage agree; O(entries) under the lock."""
        with self._lock:
            return self._books.integrity()

    # --- inside --------------------------------------------------------------------------------------------------

    def _miss(self, cause: Miss) -> Miss:
        with self._lock:
            self._counts.misses[cause] += 1
        return cause

    def _say_removed(self, info: EntryInfo) -> None:
        self._events(Removed(info.kind, Tier.HOST, (info.key,)))
