"""Peers' host tiers as a source of the tier loader: look up, lease, fetch, verify.

The wire is somebody else's (`PeerWire`); this file decides whom to ask, where entries arrive, and what is believed:
nothing but bytes whose digest is right (L3). A peer's failure is that peer's, once (L17): the keys it would have
brought are absent here, and only when no peer at all can be reached does this source say that it cannot be.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from headrace.kvcache.entries import EntryInfo, GetResult, Loaded, Miss, payload_digest
from headrace.kvcache.host.breaker import Breakers
from headrace.kvcache.host.buffer import FetchBuffer, Unit
from headrace.kvcache.keys import Key

REMEMBERED_KEYS = 1 << 17
"""Keys whose place is remembered between a lookup and the reads that follow."""
LEASE_SECONDS = 2.0
"""Asked for beyond the deadline of the read, for clocks and waiting calls."""


class PeerUnreachable(Exception):
    """A peer could not be reached, or its wire broke."""


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """A leased entry in its lessor's memory."""

    info: EntryInfo
    offset: int
    generation: int


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease as the reader knows it; `id` is empty when nothing was there."""

    id: str
    entries: tuple[RemoteEntry, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One leased entry and the byte of the buffer at which it is to arrive."""

    entry: RemoteEntry
    offset: int


@dataclass(frozen=True, eq=False)
class Fetching:
    """A fetch under way."""

    settled: Future[Any] = field(default_factory=Future)
    """Done when every byte is there; an exception: it failed, or its time was over."""
    terminal: Future[Any] = field(default_factory=Future)
    """Done, with whatever result, when nothing can write into the buffer any more (L7)."""


class PeerWire(Protocol):
    """How peers are reached. Calls return at once; futures fail with PeerUnreachable, or by `timeout_s`."""

    def candidates(self) -> Sequence[str]:
        """Incarnations that may be asked, best first."""
        ...

    def lookup(self, peer: str, keys: Sequence[Key], timeout_s: float) -> Future[Sequence[bool]]: ...

    def lease(self, peer: str, keys: Sequence[Key], seconds: float, timeout_s: float) -> Future[Granted]: ...

    def fetch(self, peer: str, lease: Granted, arrivals: Sequence[Arrival], timeout_s: float) -> Fetching: ...

    def release(self, peer: str, lease: Granted) -> None:
        """Tell the lessor; nobody waits for it, and a lost one ends by itself."""
        ...


@dataclass(frozen=True)
class PeerStats:
    """Since start, but for the last three."""

    lookups: int
    """Calls, all peers together."""
    hits: int
    nbytes: int
    misses: Mapping[Miss, int]
    """By true cause; what the loader is told of one dead peer among several is ABSENT."""
    failures: int
    """Calls or fetches that failed: about one per pause of a dead peer, whatever the number of keys."""
    open_breakers: int
    units_in_use: int
    units_quarantined: int


class PeerHostSource:
    """A TierSource named `peer`. Thread-safe; blocks at most until the deadline."""

    name = "peer"

    def __init__(
        self,
        wire: PeerWire,
        buffer: FetchBuffer,
        *,
        max_peers: int = 4,
        lookup_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_peers: asked per lookup. lookup_s: the most that a lookup waits for them."""
        self._wire = wire
        self._buffer = buffer
        self._max_peers = max_peers
        self._lookup_s = lookup_s
        self._clock = clock
        self._breakers = Breakers(clock)
        self._lock = threading.Lock()
        self._holders: OrderedDict[Key, str] = OrderedDict()
        self._useful: OrderedDict[str, None] = OrderedDict()
        """Peers that had something, the last one last."""
        self._turn = 0
        self._misses: Counter[Miss] = Counter()
        self._lookups = self._hits = self._bytes = self._failures = 0

    # --- where things are ----------------------------------------------------------------------------------------

    def hint(self, keys: Sequence[Key], peer: str) -> None:
        """Somebody who follows events (the router) says that this peer has these keys: it is asked first."""
        self._remember(keys, peer)

    def lookup(self, keys: Sequence[Key], deadline: float) -> Sequence[bool]:
        """Ask a few peers at once, for all keys, and remember who has what."""
        keys = list(keys)
        if not keys:
            return []
        timeout_s = min(self._lookup_s, deadline - self._clock())
        peers = self._whom_to_ask(keys)
        if timeout_s <= 0 or not peers:
            return [False] * len(keys)
        ends = self._clock() + timeout_s
        asked = [(peer, self._wire.lookup(peer, keys, timeout_s)) for peer in peers]
        with self._lock:
            self._lookups += len(asked)
        answers: list[tuple[int, str, Sequence[bool]]] = []
        for peer, answer in asked:
            if not self._answers(peer, answer, ends):
                continue
            there = answer.result()
            if len(there) == len(keys) and any(there):
                answers.append((sum(there), peer, there))
        found = [False] * len(keys)
        # Who has most comes last and is remembered for all it has: fewer leases.
        for _, peer, there in sorted(answers, key=lambda answer: answer[0]):
            self._remember([key for key, has in zip(keys, there, strict=True) if has], peer)
            found = [before or has for before, has in zip(found, there, strict=True)]
        with self._lock:
            for key, has in zip(keys, found, strict=True):
                if not has:
                    self._holders.pop(key, None)
        return found

    def _whom_to_ask(self, keys: Sequence[Key]) -> list[str]:
        """Hinted ones, then those that had something lately, and one of the others in turn."""
        candidates = self._wire.candidates()
        self._breakers.keep(frozenset(candidates))
        allowed = [peer for peer in candidates if self._breakers.allows(peer)]
        with self._lock:
            hinted = dict.fromkeys(self._holders[key] for key in keys if key in self._holders)
            self._turn += 1
            others = [peer for peer in allowed if peer not in hinted and peer not in self._useful]
            turn = self._turn % len(others) if others else 0
            useful = [peer for peer in reversed(self._useful) if peer not in hinted]
        known = [peer for peer in (*hinted, *useful) if peer in allowed]
        if len(known) >= self._max_peers and others:
            known = known[: self._max_peers - 1]
        return [*known, *others[turn:], *others[:turn]][: self._max_peers]

    # --- bytes ---------------------------------------------------------------------------------------------------

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[GetResult]:
        """Leases and fetches, one of each per peer, all under way at once; payloads verified against the lessor's
        description of them (L3)."""
        with self._lock:
            unknown = [key for key in keys if key not in self._holders]
        if unknown:
            self.lookup(unknown, deadline)
        with self._lock:
            groups: dict[str, list[Key]] = {}
            for key in dict.fromkeys(keys):
                if key in self._holders:
                    groups.setdefault(self._holders[key], []).append(key)
        results: dict[Key, GetResult] = {}
        leases = []
        for peer, wanted in groups.items():
            if self._breakers.allows(peer):
                timeout_s = deadline - self._clock()
                seconds = max(0.0, timeout_s) + LEASE_SECONDS
                leases.append((peer, wanted, self._wire.lease(peer, wanted, seconds, timeout_s)))
            else:
                results.update(dict.fromkeys(wanted, Miss.NOT_CONNECTED))
        fetches = []
        for peer, wanted, granting in leases:
            if not self._answers(peer, granting, deadline):
                granting.add_done_callback(partial(self._give_back, peer))
                cause = Miss.TIMEOUT if self._clock() >= deadline else Miss.NOT_CONNECTED
                results.update(dict.fromkeys(wanted, cause))
            elif granting.result().id:
                fetches.append(self._begin(peer, wanted, granting.result(), deadline, results))
        for fetch in fetches:
            self._finish(fetch, deadline, results)
        return self._told([results.pop(key, Miss.ABSENT) for key in keys])

    def _begin(
        self, peer: str, wanted: Sequence[Key], granted: Granted, deadline: float, results: dict[Key, GetResult]
    ) -> _Fetch:
        """Give each entry its place in the buffer and begin."""
        arrivals: list[Arrival] = []
        units: list[Unit] = []
        asked = set(wanted)
        for entry in granted.entries:
            info = entry.info
            if info.key not in asked or info.length != self._buffer.shape.entry_bytes(info.kind):
                results[info.key] = Miss.HEADER
                continue
            unit = self._buffer.take(info.kind)
            if unit is None:
                results[info.key] = Miss.BUSY
                continue
            asked.discard(info.key)
            arrivals.append(Arrival(entry, unit.offset))
            units.append(unit)
        fetching = None
        if arrivals:
            fetching = self._wire.fetch(peer, granted, arrivals, max(0.0, deadline - self._clock()))
        return _Fetch(peer, granted, arrivals, units, fetching)

    def _finish(self, fetch: _Fetch, deadline: float, results: dict[Key, GetResult]) -> None:
        """Wait, give the lease back, verify what came."""
        came = fetch.fetching is None or self._answers(fetch.peer, fetch.fetching.settled, deadline)
        self._wire.release(fetch.peer, fetch.granted)
        for arrival, unit in zip(fetch.arrivals, fetch.units, strict=True):
            info = arrival.entry.info
            if not came:
                results[info.key] = Miss.TIMEOUT if self._clock() >= deadline else Miss.NOT_CONNECTED
                self._abandon(unit, fetch.fetching)
                continue
            payload = self._buffer.read(unit, info.length)
            if payload_digest(payload) != info.digest:
                # The lease was over before the bytes were read, and its place has another payload now (L1).
                results[info.key] = Miss.DIGEST
                self._buffer.give(unit)
                continue
            results[info.key] = Loaded(info, payload, _once(self._buffer, unit))

    def _abandon(self, unit: Unit, fetching: Fetching | None) -> None:
        assert fetching is not None
        self._buffer.quarantine(unit)
        fetching.terminal.add_done_callback(lambda _: self._buffer.give(unit))

    def _give_back(self, peer: str, late: Future[Granted]) -> None:
        """A lease that came after nobody waited for it any more."""
        if not late.cancelled() and late.exception() is None and late.result().id:
            self._wire.release(peer, late.result())

    # --- what happened -------------------------------------------------------------------------------------------

    def _answers(self, peer: str, answer: Future[Any], ends: float) -> bool:
        """Wait for it. False when the peer failed, which is said once to its breaker."""
        try:
            answer.result(max(0.0, ends - self._clock()))
        except (PeerUnreachable, FutureTimeout):
            with self._lock:
                self._failures += 1
            self._breakers.failed(peer)
            return False
        self._breakers.answered(peer)
        return True

    def _told(self, results: list[GetResult]) -> list[GetResult]:
        """Count by true cause; failures of one peer among others that can be asked are absences."""
        with self._lock:
            for result in results:
                if isinstance(result, Loaded):
                    self._hits += 1
                    self._bytes += result.info.length
                else:
                    self._misses[result] += 1
        if Miss.NOT_CONNECTED in results and any(map(self._breakers.allows, self._wire.candidates())):
            return [Miss.ABSENT if result is Miss.NOT_CONNECTED else result for result in results]
        return results

    def _remember(self, keys: Iterable[Key], peer: str) -> None:
        with self._lock:
            for key in keys:
                self._holders[key] = peer
                self._holders.move_to_end(key)
            while len(self._holders) > REMEMBERED_KEYS:
                self._holders.popitem(last=False)
            self._useful[peer] = None
            self._useful.move_to_end(peer)
            while len(self._useful) > self._max_peers:
                self._useful.popitem(last=False)

    def stats(self) -> PeerStats:
        buffer = self._buffer.stats()
        with self._lock:
            return PeerStats(
                lookups=self._lookups,
                hits=self._hits,
                nbytes=self._bytes,
                misses=dict(self._misses),
                failures=self._failures,
                open_breakers=self._breakers.open,
                units_in_use=buffer.in_use,
                units_quarantined=buffer.quarantined,
            )


@dataclass(frozen=True, eq=False, slots=True)
class _Fetch:
    peer: str
    granted: Granted
    arrivals: list[Arrival]
    units: list[Unit]
    fetching: Fetching | None


def _once(buffer: FetchBuffer, unit: Unit) -> Callable[[], None]:
    return lambda: buffer.give(unit)
