"""Entries between put_many and the disk: tickets, keys in flight, the bounded queue."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from headrace.kvcache.entries import EntryInfo
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.keys import Key
from headrace.kvcache.store.segments.buffers import Buffer
from headrace.kvcache.store.segments.names import Bucket
from headrace.kvcache.store.segments.record import Header


class Ticket:
    """Collects the outcomes of one put_many; its future is done when the last one is known."""

    def __init__(self, entries: int) -> None:
        self.durable: Future[tuple[bool, ...]] = Future()
        # A caller's cancel must not make set_result raise in the commit thread.
        self.durable.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._results = [False] * entries
        self._left = entries + 1
        """The last one is `seal`'s, so that the future is not done while entries are still being offered."""

    def settle(self, place: int, durable: bool) -> None:
        """One entry's outcome."""
        self.settle_many((place,), durable)

    def settle_many(self, places: Sequence[int], durable: bool) -> None:
        """The same outcome of several entries."""
        with self._lock:
            for place in places:
                self._results[place] = durable
        self._less(len(places))

    def seal(self) -> None:
        """Every entry was offered."""
        self._less(1)

    def _less(self, count: int) -> None:
        with self._lock:
            self._left -= count
            done = self._left == 0
        if done:
            self.durable.set_result(tuple(self._results))


@dataclass(slots=True, eq=False)
class Pending:
    """One accepted entry."""

    info: EntryInfo
    bucket: Bucket
    buffer: Buffer | None
    """The whole record as it will lie on disk, its header still to be filled; given back once written."""
    size: int
    ticket: Ticket
    place: int
    replaces: IndexRow | None
    """The row of the copy that this one lives on for."""
    epoch: int
    """Number of erasures when it was accepted: a later one may cover it."""
    header: Header | None = None
    group: str = ""
    dispatched: bool = False
    """Handed to a thread that writes it."""
    settled: bool = False


def settle(pendings: Iterable[Pending], durable: bool) -> None:
    """Their outcome; only the first one of each counts."""
    places: dict[Ticket, list[int]] = {}
    for pending in pendings:
        if not pending.settled:
            pending.settled = True
            places.setdefault(pending.ticket, []).append(pending.place)
    for ticket, settled in places.items():
        ticket.settle_many(settled, durable)


class WriteQueue:
    """Accepted entries in order, and every key that is on its way until its outcome is known. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Pending] = deque()
        self._in_flight: dict[Key, Ticket | None] = {}
        """None: claimed, and to be added or released soon."""
        self._charges: dict[Key, tuple[bytes, int]] = {}
        """Tenant and record bytes of what is new among them."""
        self._tenants: Counter[bytes] = Counter()
        self._bytes = 0
        self._hurry = 0
        self._woken = False
        self._closed = False

    def claim(self, keys: Sequence[Key]) -> list[bool]:
        """Reserve each key for one writer; False where it is in flight already."""
        in_flight = self._in_flight
        claimed = []
        with self._changed:
            for key in keys:
                free = not self._closed and key not in in_flight
                if free:
                    in_flight[key] = None
                claimed.append(free)
        return claimed

    def release(self, keys: Iterable[Key]) -> None:
        """Keys are no longer in flight."""
        with self._changed:
            for key in keys:
                self._in_flight.pop(key, None)
                tenant, size = self._charges.pop(key, (b"", 0))
                if size:
                    self._tenants[tenant] -= size
            self._changed.notify_all()

    def add(self, pendings: Sequence[Pending]) -> None:
        """Their keys were claimed."""
        with self._changed:
            waited_for = not self._queue
            for pending in pendings:
                key, tenant = pending.info.key, pending.info.tenant_tag
                self._in_flight[key] = pending.ticket
                if pending.replaces is None:
                    self._charges[key] = tenant, pending.size
                    self._tenants[tenant] += pending.size
                self._bytes += pending.size
            self._queue.extend(pendings)
            if waited_for and self._queue:
                self._changed.notify_all()

    def take(self, limit: int, timeout: float, *, eager: bool) -> Sequence[Pending]:
        """The next entries up to `limit` bytes, at least one; empty after `timeout` seconds, at once when the queue is
        drained, or, if `eager`, when somebody hurries."""
        until = time.monotonic() + timeout
        with self._changed:
            while not self._queue and not self._woken:
                left = until - time.monotonic()
                if self._ended or (eager and self._hurry) or left <= 0 or not self._changed.wait(left):
                    break
            self._woken = False
            taken: list[Pending] = []
            size = 0
            while self._queue and (not taken or size + self._queue[0].size <= limit):
                pending = self._queue.popleft()
                size += pending.size
                taken.append(pending)
            self._bytes -= size
            return taken

    def wake(self) -> None:
        """Whoever takes looks up once, entries or not."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def wait_settled(self, timeout: float) -> bool:
        """Hurry everything that is in flight now to its outcome."""
        until = time.monotonic() + timeout
        with self._changed:
            waiting = dict(self._in_flight)
            self._hurry += 1
            self._changed.notify_all()
            try:
                while any(self._in_flight.get(key, self) is ticket for key, ticket in waiting.items()):
                    left = until - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        return False
                return True
            finally:
                self._hurry -= 1

    def close(self) -> None:
        """Nothing more is claimed; what is queued, or claimed already and about to be, is still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def drained(self) -> bool:
        """Closed and empty, and nothing that was claimed before can come any more."""
        with self._changed:
            return self._ended and not self._queue

    @property
    def _ended(self) -> bool:
        return self._closed and None not in self._in_flight.values()

    def tenant_bytes(self, tenant_tag: bytes) -> int:
        """Record bytes of a tenant's new entries whose outcome is not known yet."""
        with self._changed:
            return self._tenants[tenant_tag]

    @property
    def in_flight(self) -> int:
        """Keys whose outcome is not known yet."""
        with self._changed:
            return len(self._in_flight)

    def sizes(self) -> tuple[int, int]:
        """Entries and bytes queued."""
        with self._changed:
            return len(self._queue), self._bytes
