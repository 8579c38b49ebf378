"""The numbered log of one source's cache events (L24): bounded, gapless, and a snapshot that agrees with it.

A source is one life of something that holds entries: a worker's incarnation (its device pool and host tier), or one
store writer under an epoch of its own. Its tiers call `append` after a change is true; readers follow by sequence with
`read`. The log keeps the latest events only. A reader that fell behind, came from another life, or asks for the future
gets `gap`, takes a `snapshot`, and goes on from its watermark: whatever it missed is in there.

Who applies events and how, in one place: `HeldEntries`. The log keeps one for snapshots, every reader may keep another.
Any thread; nothing blocks for longer than a lock around dictionary work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from headrace.kvcache.cache_events import (
    BucketDropped,
    CacheChange,
    Cleared,
    NamespaceDropped,
    Removed,
    Stored,
    Tier,
)
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.keys import Key

DEFAULT_KEPT_KEYS: Final = 65_536
"""Keys that a log keeps in events: 2 MiB of them, minutes of a busy worker's changes."""


@dataclass(frozen=True, slots=True)
class Source:
    """Who numbers the events."""

    replica_id: str
    incarnation: str
    """Of the worker; the epoch of a store writer. Sequences of different incarnations do not compare (L14)."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """One event of a source."""

    sequence: int
    """From 1, rising by one."""
    change: CacheChange


@dataclass(frozen=True, slots=True)
class Read:
    """What follows a reader's position."""

    events: tuple[Numbered, ...]
    next_sequence: int
    """Ask from here next."""
    gap: bool
    """Events between the reader's position and these are lost to it: take a snapshot."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a source holds, true for one sequence."""

    source: Source
    watermark: int
    """Every event up to it is in; apply those from watermark + 1 on. Events are idempotent, so one that is in already
    (contents that are read while they change, such as a store's index) does no harm."""
    entries: Iterable[Stored]


class Held(NamedTuple):
    """One entry as its Stored event told it. A tuple, since one is made per entry on the thread that tells."""

    parent: Key | None
    end_tokens: int
    entry_bytes: int
    bucket: str


class HeldEntries:
    """What a source holds according to its events; applying one twice changes nothing the second time."""

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens {block_tokens} must be at least 1")
        self._block_tokens = block_tokens
        self._entries: dict[tuple[Tier, EntryKind], dict[Key, Held]] = {}

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._entries.values())

    def __contains__(self, place: tuple[Tier, EntryKind, Key]) -> bool:
        tier, kind, key = place
        return key in self._entries.get((tier, kind), ())

    def keys(self, tier: Tier, kind: EntryKind) -> frozenset[Key]:
        return frozenset(self._entries.get((tier, kind), ()))

    def count(self, tier: Tier, kind: EntryKind) -> int:
        return len(self._entries.get((tier, kind), ()))

    def apply(self, change: CacheChange) -> None:
        """Take one event in."""
        match change:
            case Stored():
                entries = self._entries.setdefault((change.tier, change.kind), {})
                entries.update(self._described(change))
            case Removed(kind, tier, keys):
                entries = self._entries.get((tier, kind), {})
                for key in keys:
                    entries.pop(key, None)
            case BucketDropped(bucket):
                self._drop_store(lambda name: name == bucket)
            case NamespaceDropped(namespace):
                # A bucket's name begins with its namespace (store/base.py); other tiers tell their keys one by one.
                prefix = f"{namespace.hex()}/"
                self._drop_store(lambda name: name.startswith(prefix))
            case Cleared(tier):
                for kind in EntryKind:
                    self._entries.pop((tier, kind), None)

    def copy(self, tiers: Sequence[Tier] = ()) -> list[tuple[Tier, EntryKind, dict[Key, Held]]]:
        """All entries of some tiers (none named: all), in the order they came. Copies dictionaries alone:
        the log holds its lock meanwhile (7 ms of a core for 100,000 entries)."""
        return [
            (tier, kind, entries.copy())
            for (tier, kind), entries in self._entries.items()
            if not tiers or tier in tiers
        ]

    def _described(self, change: Stored) -> Iterator[tuple[Key, Held]]:
        parent, end = change.parent, change.end_tokens - (len(change.keys) - 1) * self._block_tokens
        for key in change.keys:
            yield key, Held(parent, end, change.entry_bytes, change.bucket)
            parent, end = (None if change.kind is EntryKind.SNAPSHOT else key), end + self._block_tokens

    def _drop_store(self, gone: Callable[[str], bool]) -> None:
        for kind in EntryKind:
            entries = self._entries.get((Tier.STORE, kind))
            if entries:
                for key in [key for key, held in entries.items() if gone(held.bucket)]:
                    del entries[key]


def as_stored(
    copied: Iterable[tuple[Tier, EntryKind, Mapping[Key, Held]]], block_tokens: int, most_keys: int = 1024
) -> Iterator[Stored]:
    """Copied entries as Stored events: blocks that follow each other in a chain share one of ≤ `most_keys`."""
    for tier, kind, entries in copied:
        run: list[Key] = []
        first = last = None
        for key, held in entries.items():
            follows = (
                last is not None
                and kind is EntryKind.BLOCK
                and len(run) < most_keys
                and held.parent == run[-1]
                and held.end_tokens == last.end_tokens + block_tokens
                and (held.entry_bytes, held.bucket) == (last.entry_bytes, last.bucket)
            )
            if not follows and first is not None and last is not None:
                yield Stored(kind, tier, tuple(run), first.parent, last.end_tokens, last.entry_bytes, last.bucket)
                run = []
            if not run:
                first = held
            run.append(key)
            last = held
        if first is not None and last is not None:
            yield Stored(kind, tier, tuple(run), first.parent, last.end_tokens, last.entry_bytes, last.bucket)


class EventLog:
    """Numbers one source's events. `append` is the EventSink that its tiers are given."""

    def __init__(
        self,
        source: Source,
        block_tokens: int,
        *,
        kept_keys: int = DEFAULT_KEPT_KEYS,
        contents: Callable[[], Iterable[Stored]] | None = None,
    ) -> None:
        """`contents` lists what is held where that is too much to mirror here (a store's index); else a mirror does."""
        if kept_keys < 1:
            raise ValueError(f"kept_keys {kept_keys} must be at least 1")
        self.source = source
        self._block_tokens = block_tokens
        self._kept_keys = kept_keys
        self._contents = contents
        self._held = HeldEntries(block_tokens)
        self._lock = threading.Lock()
        self._events: deque[CacheChange] = deque()
        self._first = 1
        self._weight = 0
        self._listeners: dict[int, Callable[[], None]] = {}
        self._next_listener = 0

    @property
    def last_sequence(self) -> int:
        """Of the latest event; 0 before the first."""
        with self._lock:
            return self._first + len(self._events) - 1

    @property
    def kept(self) -> int:
        """Events that can still be read."""
        return len(self._events)

    def append(self, change: CacheChange) -> None:
        """Number a change that is true already, and wake whoever listens."""
        with self._lock:
            self._events.append(change)
            self._weight += _weight(change)
            while self._weight > self._kept_keys and len(self._events) > 1:
                self._weight -= _weight(self._events.popleft())
                self._first += 1
            if self._contents is None:
                self._held.apply(change)
            listeners = tuple(self._listeners.values())
        for wake in listeners:
            wake()

    def read(self, from_sequence: int, incarnation: str = "", *, most_keys: int = 4096) -> Read:
        """Events from a sequence on, as many as hold `most_keys` keys and at least one where there is one.

        `incarnation` is whose events the reader has; empty for one that has none. A gap comes without events.
        """
        with self._lock:
            after = self._first + len(self._events)
            start = max(from_sequence, 1)
            foreign = bool(incarnation) and incarnation != self.source.incarnation
            if foreign or start < self._first or start > after:
                return Read((), after, True)
            events: list[Numbered] = []
            weight = 0
            for change in islice(self._events, start - self._first, None):
                weight += _weight(change)
                if events and weight > most_keys:
                    break
                events.append(Numbered(start + len(events), change))
        return Read(tuple(events), start + len(events), False)

    def snapshot(self, tiers: Sequence[Tier] = ()) -> Snapshot:
        """What is held in these tiers (none named: all) and the sequence it is true for."""
        with self._lock:
            watermark = self._first + len(self._events) - 1
            copied = None if self._contents is not None else self._held.copy(tiers)
        if copied is None:
            assert self._contents is not None
            # Read after the watermark was taken: what changes meanwhile comes again as an event behind it.
            entries: Iterable[Stored] = (one for one in self._contents() if not tiers or one.tier in tiers)
        else:
            entries = as_stored(copied, self._block_tokens)
        return Snapshot(self.source, watermark, entries)

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after every append, on the appending thread: it must not block. Returns what ends it."""
        with self._lock:
            number = self._next_listener
            self._next_listener += 1
            self._listeners[number] = wake

        def end() -> None:
            with self._lock:
                self._listeners.pop(number, None)

        return end


def _weight(change: CacheChange) -> int:
    return len(change.keys) if isinstance(change, Stored | Removed) and change.keys else 1
