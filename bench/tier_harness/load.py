"""Entries to store, and readers and a writer that go on while something dies."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.kvcache.entries import EntryInfo, EntryKind, Loaded, Miss, RetentionClass, payload_digest
from headrace.kvcache.store.base import PutEntry, Store

BLOCK_BYTES = 114_048
"""A row of DeepSeek-V4.1 (spec/kv_tier.md)."""
_NAMESPACE = hashlib.sha256(b"namespace of bench.tier_faults").digest()


def make_block(number: int, length: int = BLOCK_BYTES) -> PutEntry:
    """Block `number` of one long chain; its payload belongs to it alone."""
    key = hashlib.sha256(f"block {number}".encode()).digest()
    parent = hashlib.sha256(f"block {number - 1}".encode()).digest()
    payload = random.Random(number).randbytes(length)
    tokens = (number + 1) * 128
    info = EntryInfo(
        key,
        EntryKind.BLOCK,
        _NAMESPACE,
        parent,
        tokens,
        length,
        payload_digest(payload),
        RetentionClass.CHAT,
        b"tenant of bench.",
    )
    return PutEntry(info, payload)


def write(store: Store, entries: Sequence[PutEntry], timeout_s: float = 120.0) -> list[EntryInfo]:
    """Store entries and return those that became durable."""
    durable: list[EntryInfo] = []
    left = list(entries)
    deadline = time.monotonic() + timeout_s
    while left and time.monotonic() < deadline:
        batch, left = left[:64], left[64:]
        ticket = store.put_many(batch)
        outcome = ticket.durable.result(timeout=timeout_s)
        durable += [entry.info for entry, there in zip(batch, outcome, strict=True) if there]
    return durable


def read_back(store: Store, infos: Sequence[EntryInfo], deadline_s: float) -> Counter[str]:
    """Read everything once, 16 at a time: `hit`, `wrong`, or a miss's cause → how many."""
    outcomes: Counter[str] = Counter()
    for start in range(0, len(infos), 16):
        part = infos[start : start + 16]
        results = store.get_many([info.key for info in part], time.monotonic() + deadline_s)
        outcomes.update(_outcome(result, info) for result, info in zip(results, part, strict=True))
    return outcomes


@dataclass(frozen=True)
class Call:
    """One get_many of a reader."""

    began: float
    took_s: float
    outcomes: Counter[str]


@dataclass
class Load:
    """Readers that ask for 16 random durable entries at a time, and a writer that adds entries, until `stop`."""

    stores: Sequence[Store]
    """Readers are spread over these; the first one is written to."""
    durable: list[EntryInfo]
    """What may be asked for; the writer adds what it made durable."""
    readers: int = 2
    deadline_s: float = 1.0
    """Of each read."""
    first_new: int = 0
    """Number of the first block that the writer adds; 0: nobody writes."""
    calls: list[Call] = field(default_factory=list)
    refused: int = 0
    """Entries that the writer could not make durable."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(self.readers):
            store = self.stores[number % len(self.stores)]
            self._threads.append(threading.Thread(target=self._read, args=(store, number), daemon=True))
        if self.first_new:
            self._threads.append(threading.Thread(target=self._write, daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def worst_s(self, since: float, until: float = float("inf")) -> float:
        """The longest read that was under way at some time of [since, until)."""
        return max(
            (call.took_s for call in self.calls if call.began < until and call.began + call.took_s > since), default=0.0
        )

    def worst_before_s(self, until: float) -> float:
        """The longest read that had ended by then."""
        return max((call.took_s for call in self.calls if call.began + call.took_s <= until), default=0.0)

    def outcomes(self, since: float, until: float = float("inf")) -> Counter[str]:
        """What the reads that began and ended in [since, until) came to."""
        total: Counter[str] = Counter()
        for call in self.calls:
            if since <= call.began and call.began + call.took_s < until:
                total += call.outcomes
        return total

    def _read(self, store: Store, seed: int) -> None:
        chance = random.Random(seed)
        while not self._stop.is_set():
            asked = chance.sample(self.durable, min(16, len(self.durable)))
            began = time.monotonic()
            results = store.get_many([info.key for info in asked], began + self.deadline_s)
            took = time.monotonic() - began
            outcomes = Counter(_outcome(result, info) for result, info in zip(results, asked, strict=True))
            self.calls.append(Call(began, took, outcomes))
            if outcomes["hit"] == 0:
                self._stop.wait(0.002)  # an engine that waits for nothing would otherwise spin

    def _write(self) -> None:
        number = self.first_new
        while not self._stop.is_set():
            batch = [make_block(each) for each in range(number, number + 8)]
            number += 8
            outcome = self.stores[0].put_many(batch).durable.result(timeout=60.0)
            self.durable += [entry.info for entry, there in zip(batch, outcome, strict=True) if there]
            self.refused += outcome.count(False)
            self._stop.wait(0.02)


def _outcome(result: Loaded | Miss, info: EntryInfo) -> str:
    if isinstance(result, Miss):
        return result.value
    right = result.info == info and payload_digest(result.payload) == info.digest
    result.release()
    return "hit" if right else "wrong"
