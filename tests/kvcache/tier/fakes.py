"""Tiers in a dictionary, for tests of loader and writer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from headrace.kvcache.entries import EntryInfo, EntryKind, GetResult, Loaded, Miss, RetentionClass, payload_digest
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import (
    Capabilities,
    CollectReport,
    DropCount,
    PutEntry,
    PutTicket,
    ScannedEntry,
    Store,
    StoredEntry,
    StoreStats,
    VerifyReport,
)


@dataclass
class FakeSource:
    """A TierSource that counts what it gave out, and fails as told."""

    name: str = "store"
    entries: dict[Key, tuple[EntryInfo, bytes]] = field(default_factory=dict)
    lent: int = 0
    asked: list[Key] = field(default_factory=list)
    looked_up: int = 0
    fail: Callable[[Key], Miss | None] = lambda key: None
    gate: threading.Event | None = None
    """Reads and lookups wait for it, past any deadline."""
    said_there: set[Key] | None = None
    """What lookup answers, where that is not the truth."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, key: Key, kind: EntryKind, tokens: int, payload: bytes, **changes: object) -> None:
        info = EntryInfo(
            key,
            kind,
            bytes(32),
            bytes(32),
            tokens,
            len(payload),
            payload_digest(payload),
            RetentionClass.CHAT,
            bytes(16),
        )
        self.entries[key] = (replace(info, **changes), payload)  # type: ignore[arg-type]

    def lookup(self, keys: Sequence[Key], deadline: float) -> Sequence[bool]:
        if self.gate is not None:
            self.gate.wait()
        self.looked_up += 1
        there = self.entries.keys() if self.said_there is None else self.said_there
        return [key in there for key in keys]

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[GetResult]:
        if self.gate is not None:
            self.gate.wait()
        return [self._get(key) for key in keys]

    def _get(self, key: Key) -> GetResult:
        with self.lock:
            self.asked.append(key)
            miss = self.fail(key)
            if miss is not None:
                return miss
            if key not in self.entries:
                return Miss.ABSENT
            info, payload = self.entries[key]
            self.lent += 1
        return Loaded(info, memoryview(payload), self._release)

    def _release(self) -> None:
        with self.lock:
            self.lent -= 1
            assert self.lent >= 0, "released twice"


@dataclass
class FakePool:
    """The engine's side of a load."""

    room: int = 1 << 30
    adopted: list[tuple[Key, EntryKind, bytes]] = field(default_factory=list)
    over: bool = False

    def adopt(self, entries: Sequence[tuple[Key, EntryKind, memoryview]]) -> Future[int]:
        answer: Future[int] = Future()
        if self.over:
            answer.set_exception(RuntimeError("the load is over"))
            return answer
        taken = 0
        for key, kind, payload in entries:
            if kind is EntryKind.BLOCK and self.room == 0:
                break
            self.room -= kind is EntryKind.BLOCK
            self.adopted.append((key, kind, bytes(payload)))
            taken += 1
        answer.set_result(taken)
        return answer


class FakeStore(Store):
    """A Store in memory: everything is durable at once unless told otherwise."""

    capabilities = Capabilities(True, True, True, True, True, True, True)

    def __init__(self) -> None:
        self.source = FakeSource()
        self.touched: list[tuple[tuple[Key, ...], RetentionClass]] = []
        self.puts: list[Key] = []
        self.full = False
        self.broken = False
        self.hold: list[tuple[Future[tuple[bool, ...]], tuple[bool, ...]]] | None = None

    def put_many(self, entries: Sequence[PutEntry]) -> PutTicket:
        if self.broken:
            raise RuntimeError("broken")
        accepted = tuple(not self.full and entry.info.key not in self.source.entries for entry in entries)
        for entry, taken in zip(entries, accepted, strict=True):
            assert payload_digest(entry.payload) == entry.info.digest
            if taken:
                self.source.entries[entry.info.key] = (entry.info, bytes(entry.payload))
                self.puts.append(entry.info.key)
        durable: Future[tuple[bool, ...]] = Future()
        if self.hold is None:
            durable.set_result(accepted)
        else:
            self.hold.append((durable, accepted))
        return PutTicket(accepted, durable)

    def lookup(self, keys: Sequence[Key], deadline: float) -> Sequence[bool]:
        return self.source.lookup(keys, deadline)

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[GetResult]:
        return self.source.get_many(keys, deadline)

    def touch(self, keys: Sequence[Key], retention: RetentionClass, tenant_tag: bytes) -> None:
        self.touched.append((tuple(keys), retention))

    def find(self, keys: Sequence[Key], deadline: float) -> Sequence[StoredEntry | None]:
        raise NotImplementedError

    def scan(self) -> Iterator[ScannedEntry]:
        raise NotImplementedError

    def drop_bucket(self, bucket: str) -> DropCount:
        raise NotImplementedError

    def drop_namespace(self, namespace: bytes) -> DropCount:
        raise NotImplementedError

    def drop_tenant(self, tenant_tag: bytes) -> DropCount:
        raise NotImplementedError

    def pin(self, keys: Sequence[Key]) -> int:
        raise NotImplementedError

    def collect(self) -> CollectReport:
        raise NotImplementedError

    def verify(self, progress: Callable[[int], None] = lambda done: None) -> VerifyReport:
        raise NotImplementedError

    def stats(self) -> StoreStats:
        return StoreStats()

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


def until(condition: Callable[[], bool], patience_s: float = 20.0) -> None:
    """Wait for another thread; fails when it never comes."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)
