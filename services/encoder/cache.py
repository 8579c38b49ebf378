"""Embeddings of images: one registered region of rows, entries by key, leases, one computation per key in flight.

Keys are HMAC(tenant's image key, content digest), so nothing is shared beyond a tenant, not even in flight (L25).
Every method belongs to the event loop's thread; the tower writes rows on its own thread, into rows that nobody else
may touch until `ready` is set.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from headrace.engine.vision.geometry import ImagePlan
from headrace.kvcache.memory import zeroed
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import NotFound, ResourceExhausted

RETRY_AFTER_S = 0.5


@dataclass(eq=False)
class Entry:
    """One embedding, from the moment somebody asked for it."""

    key: bytes
    planned: asyncio.Future[ImagePlan]
    """The picture is decoded and its geometry known; or why it cannot be."""
    ready: asyncio.Future[float]
    """All rows are written; seconds the tower took."""
    rows: tuple[int, ...] = ()
    leases: set[str] = field(default_factory=set)
    pushes: int = 0
    """Transfers that read the rows and are not terminal (L7)."""

    @property
    def evictable(self) -> bool:
        return self.ready.done() and not self.leases and not self.pushes


@dataclass
class _Lease:
    entry: Entry
    expires: float


class EmbeddingCache:
    """`num_rows` rows of `row_bytes`, uint8, in one tensor that the transfer engine has registered."""

    def __init__(self, num_rows: int, row_bytes: int, max_pending: int, lease_s: float, clock: Clock) -> None:
        self.memory = zeroed(num_rows, row_bytes)
        self._free = list(range(num_rows - 1, -1, -1))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._leases: dict[str, _Lease] = {}
        self._max_pending = max_pending
        self._lease_s = lease_s
        self._clock = clock

    @property
    def num_rows(self) -> int:
        return int(self.memory.shape[0])

    @property
    def pending(self) -> int:
        """Embeddings asked for and not computed yet."""
        return sum(not entry.ready.done() for entry in self._entries.values())

    @property
    def pending_tokens(self) -> int:
        """Image tokens that wait for the tower. A picture counts from when it has been read."""
        return sum(len(entry.rows) for entry in self._entries.values() if not entry.ready.done())

    @property
    def leases(self) -> int:
        return len(self._leases)

    def find_or_begin(self, key: bytes) -> tuple[Entry, bool]:
        """The entry of a key, and whether it was there already; a new one is the caller's to compute.

        Raises ResourceExhausted when too many are pending (L12).
        """
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry, True
        if self.pending >= self._max_pending:
            raise ResourceExhausted(
                f"{self._max_pending} images wait to be encoded; try again", retry_after_s=RETRY_AFTER_S
            )
        loop = asyncio.get_running_loop()
        entry = Entry(key, loop.create_future(), loop.create_future())
        for future in (entry.planned, entry.ready):
            # Every waiter may have left before the failure; it is logged where it arises.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._entries[key] = entry
        return entry, False

    def place(self, entry: Entry, count: int) -> None:
        """Give the entry its rows, evicting the least recently used embeddings that nobody holds.

        Raises ResourceExhausted when it does not fit now, or never will.
        """
        if count > self.num_rows:
            raise ResourceExhausted(
                f"an image of {count} tokens exceeds the embedding pool of {self.num_rows} rows; send a smaller one "
                "or raise encoder.pool_bytes",
                retry_after_s=60.0,
            )
        for key in [key for key, other in self._entries.items() if other.evictable]:
            if len(self._free) >= count:
                break
            self._free.extend(self._entries.pop(key).rows)
        if len(self._free) < count:
            raise ResourceExhausted(
                "the embedding pool is full of leased images; try again", retry_after_s=RETRY_AFTER_S
            )
        entry.rows = tuple(self._free.pop() for _ in range(count))

    def fail(self, entry: Entry, error: Exception) -> None:
        """The embedding cannot be made; all who wait for it hear why, and the next request tries anew."""
        self._entries.pop(entry.key, None)
        for lease in entry.leases:
            del self._leases[lease]
        entry.leases.clear()
        self._free.extend(entry.rows)
        entry.rows = ()
        for future in (entry.planned, entry.ready):
            if not future.done():
                future.set_exception(error)

    def lease(self, entry: Entry) -> str:
        """A new lease on the entry; it cannot be evicted until the lease ends."""
        identifier = secrets.token_hex(16)
        entry.leases.add(identifier)
        self._leases[identifier] = _Lease(entry, self._clock.monotonic() + self._lease_s)
        return identifier

    def leased(self, identifier: str) -> Entry:
        """The entry of a lease. Raises NotFound when it has ended (L8): encode again."""
        lease = self._leases.get(identifier)
        if lease is None:
            raise NotFound("this embedding lease has ended; encode the image again", field="handle.lease_id")
        return lease.entry

    def renew(self, identifier: str) -> bool:
        """Extend a lease; false when it has ended."""
        lease = self._leases.get(identifier)
        if lease is None:
            return False
        lease.expires = self._clock.monotonic() + self._lease_s
        return True

    def release(self, identifier: str) -> None:
        """End a lease; unknown ones are no error."""
        lease = self._leases.pop(identifier, None)
        if lease is not None:
            lease.entry.leases.discard(identifier)

    def reap(self) -> int:
        """End the leases whose time has come (L8); called on the reaper's own clock (L9). Returns how many."""
        now = self._clock.monotonic()
        over = [identifier for identifier, lease in self._leases.items() if lease.expires <= now]
        for identifier in over:
            self.release(identifier)
        return len(over)

    def begin_push(self, entry: Entry) -> None:
        """A transfer reads the rows from now on (L7)."""
        entry.pushes += 1

    def end_push(self, entry: Entry) -> None:
        """The transfer is terminal."""
        if not entry.pushes:
            raise RuntimeError("a push ended that never began")
        entry.pushes -= 1

    def integrity(self) -> tuple[str, ...]:
        """Broken invariants in words (L11): every row is free or in exactly one entry, every lease has its entry."""
        problems = []
        held = [row for entry in self._entries.values() for row in entry.rows]
        everything = sorted(held + self._free)
        if everything != list(range(self.num_rows)):
            problems.append(f"{len(held)} held and {len(self._free)} free rows are not the {self.num_rows} of the pool")
        for identifier, lease in self._leases.items():
            if identifier not in lease.entry.leases or self._entries.get(lease.entry.key) is not lease.entry:
                problems.append(f"lease {identifier[:8]} names an entry that is gone")
        if sum(len(entry.leases) for entry in self._entries.values()) != len(self._leases):
            problems.append("entries and leases disagree")
        return tuple(problems)

    def counts(self) -> tuple[int, int, int]:
        """Rows (free, used by leased, pending or pushed embeddings, cached for reuse)."""
        cached = sum(len(entry.rows) for entry in self._entries.values() if entry.evictable)
        return len(self._free), self.num_rows - len(self._free) - cached, cached
