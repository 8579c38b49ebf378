"""What peers may read, and until when: pins in the host tier under leases of seconds.

A lease ends when the reader says so, when its time is over by this process's clock, or when its reader is known to be
dead (L8). Then its places may be reused although the reader may still be reading: a process that was stopped wakes late
and gets other bytes, which it finds out by the digest (L1, L3). Only what this process itself still sends stays pinned
longer (L7).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.host.types import Pinned
from headrace.kvcache.keys import Key

MAX_SECONDS = 10.0


class LeaseRefused(RuntimeError):
    """Too many leases are out (L12). Ask again later, or go on without."""


class LeaseEnded(LookupError):
    """No such lease of this reader, any more. Ask for a new one."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A granted lease."""

    id: str
    reader: str
    """Incarnation."""
    entries: tuple[Pinned, ...]
    """What of the keys was there, in their order."""
    seconds: float


@dataclass(eq=False, slots=True)
class _Live:
    lease: Lease
    ends: float
    sends: int = 0
    """Writes of this process that read from the places."""
    ended: bool = False


@dataclass(frozen=True)
class LeaseStats:
    """granted = live + released + expired + bereaved, at every instant (L11)."""

    live: int
    sending: int
    """Ended ones whose entries this process still sends."""
    leased_bytes: int
    """Of both."""
    granted: int
    released: int
    expired: int
    bereaved: int
    """Ended because the reader died."""
    refused: int


class LeaseTable:
    """Thread-safe. `expire` is to be called on a clock of its own (L9)."""

    def __init__(
        self,
        tier: HostTier,
        *,
        max_leases: int = 256,
        max_bytes: int | None = None,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_bytes: leased at once (default: a quarter of the tier, so that its own worker still finds room to
        write)."""
        self._tier = tier
        self._max_leases = max_leases
        self._max_bytes = tier.shape.total_bytes // 4 if max_bytes is None else max_bytes
        self._max_seconds = max_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._live: dict[str, _Live] = {}
        self._sending: set[_Live] = set()
        self._bytes = 0
        self._ids = count(1)
        self._granted = self._released = self._expired = self._bereaved = self._refused = 0

    def grant(self, reader: str, keys: Sequence[Key], seconds: float) -> Lease | None:
        """Pin what is there, leading keys first, as far as the bound goes; None when that is nothing.

        Raises LeaseRefused.
        """
        seconds = min(seconds, self._max_seconds)
        with self._lock:
            if len(self._live) + len(self._sending) >= self._max_leases:
                self._refused += 1
                raise LeaseRefused(f"{len(self._live)} leases of the host tier are out; ask again later")
            entries: list[Pinned] = []
            for key in dict.fromkeys(keys):
                if self._bytes >= self._max_bytes:
                    break
                pinned = self._tier.pin(key)
                if pinned is not None:
                    entries.append(pinned)
                    self._bytes += pinned.info.length
            if not entries:
                return None
            # A peer's use counts like the own worker's.
            self._tier.touch([pinned.info.key for pinned in entries])
            lease = Lease(f"{next(self._ids)}", reader, tuple(entries), seconds)
            self._live[lease.id] = _Live(lease, self._clock() + seconds)
            self._granted += 1
            return lease

    def release(self, reader: str, lease_id: str) -> bool:
        """The reader is done. False when the lease has ended already, or is another's."""
        with self._lock:
            live = self._live.get(lease_id)
            if live is None or live.lease.reader != reader:
                return False
            self._released += 1
            self._end(live)
            return True

    def expire(self) -> int:
        """End what is over; returns how many."""
        with self._lock:
            now = self._clock()
            over = [live for live in self._live.values() if now >= live.ends]
            for live in over:
                self._end(live)
            self._expired += len(over)
            return len(over)

    def reader_died(self, reader: str) -> int:
        """End all of a reader's leases, on evidence of its death; returns how many."""
        with self._lock:
            its = [live for live in self._live.values() if live.lease.reader == reader]
            for live in its:
                self._end(live)
            self._bereaved += len(its)
            return len(its)

    def begin_send(self, reader: str, lease_id: str) -> tuple[Lease, Callable[[], None]]:
        """This process is going to send entries of the lease: they stay in place until the returned function is called,
        once, when the wire is quiet (L7).

        Raises LeaseEnded.
        """
        with self._lock:
            live = self._live.get(lease_id)
            if live is None or live.lease.reader != reader or self._clock() >= live.ends:
                raise LeaseEnded(f"lease {lease_id} has ended, or is another's; ask for a new one")
            live.sends += 1
        return live.lease, lambda: self._sent(live)

    def stats(self) -> LeaseStats:
        with self._lock:
            return LeaseStats(
                live=len(self._live),
                sending=len(self._sending),
                leased_bytes=self._bytes,
                granted=self._granted,
                released=self._released,
                expired=self._expired,
                bereaved=self._bereaved,
                refused=self._refused,
            )

    # --- inside --------------------------------------------------------------------------------------------------

    def _end(self, live: _Live) -> None:
        del self._live[live.lease.id]
        live.ended = True
        if live.sends:
            self._sending.add(live)
        else:
            self._unpin(live)

    def _sent(self, live: _Live) -> None:
        with self._lock:
            live.sends -= 1
            if live.ended and not live.sends:
                self._sending.discard(live)
                self._unpin(live)

    def _unpin(self, live: _Live) -> None:
        for pinned in live.lease.entries:
            self._tier.unpin(pinned.pin)
            self._bytes -= pinned.info.length
