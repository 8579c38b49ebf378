"""The interface of a store (spec/kv_tier.md, Interface): small, capability-flagged, nothing emulated silently.

Thread-safe; calls block the caller at most until the given deadline. Reads never raise for what a disk, server or
mount does: every failure is a Miss counted by cause (L17). Writes are accepted into a bounded queue or refused at once,
and durable later; only durable entries are announced (Stored) and only those are promised to survive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from headrace.kvcache.entries import EntryInfo, EntryKind, GetResult, Miss, RetentionClass
from headrace.kvcache.keys import Key

WallClock = Callable[[], float]
"""Seconds since 1970; injected, since expiry is simulated in tests and benchmarks."""


class StoreError(Exception):
    """A store cannot be opened or an operator's call cannot be carried out; the message says what to do."""


class CapabilityMissing(StoreError):
    """The engine does not offer this operation; `Store.capabilities` says so beforehand."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do besides put, get, lookup, drop_bucket, stats and close."""

    refresh: bool
    """touch can prolong an entry's life."""
    drop_tenant: bool
    drop_namespace: bool
    scan: bool
    """scan lists everything, so that a lost index can be rebuilt."""
    pin: bool
    quota: bool
    """Enforces capacity and per-tenant quotas itself."""
    replicated: bool
    """Survives the loss of one machine by itself."""


@dataclass(frozen=True, slots=True)
class PutEntry:
    """An entry to store. The payload is copied before put_many returns."""

    info: EntryInfo
    payload: bytes | memoryview


@dataclass(frozen=True)
class PutTicket:
    """The two results of put_many, by entry."""

    accepted: tuple[bool, ...]
    """Taken into memory. False: the queue is full (suffixes go first), the entry is present or in flight already, or
    over the tenant's quota; nothing of it will be stored by this call."""
    durable: Future[tuple[bool, ...]]
    """After the sync: which entries are on disk (on enough machines) for good. Never an exception; False counts as a
    failed write by cause in stats. Entries that were not accepted are False."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """What the index says of an entry."""

    key: Key
    kind: EntryKind
    tokens: int
    length: int
    retention: RetentionClass
    tenant_tag: bytes
    expires_at: float
    """Wall clock; infinity for pinned ones."""
    bucket: str
    """`<namespace hex>/<class>/<expiry bucket>`, the unit of expiry."""


@dataclass(frozen=True, slots=True)
class ScannedEntry:
    """What a record says of itself."""

    info: EntryInfo
    expires_at: float
    bucket: str


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened, and sizes of now."""

    blocks: int = 0
    snapshots: int = 0
    payload_bytes: int = 0
    disk_bytes: int = 0
    capacity_bytes: int = 0
    index_bytes: int = 0
    hits: int = 0
    misses: Mapping[Miss, int] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0
    """Payload bytes that became durable, refreshed copies included."""
    refreshed_bytes: int = 0
    """Of these, re-appended to live on."""
    evicted_entries: int = 0
    expired_entries: int = 0
    refused_full: int = 0
    refused_quota: int = 0
    refused_known: int = 0
    """Puts of entries that were there or in flight already."""
    failed_writes: Mapping[str, int] = field(default_factory=dict)
    """By cause: `ENOSPC`, `EIO`, `timeout` ….."""
    queued_entries: int = 0
    queued_bytes: int = 0
    quarantined: int = 0
    """Records whose digest failed and that are not read again."""
    buckets: int = 0
    segments: int = 0
    sweeper: bool = False
    """This process is the elected sweeper, whose sizes are a sweep old at most; another one's are, in a large store,
    those of its start and what it wrote and removed itself since."""
    direct_io: bool = False
    """Files are read and written past the page cache; False also for engines without files of their own."""


@dataclass(frozen=True)
class DropCount:
    blocks: int = 0
    snapshots: int = 0


@dataclass(frozen=True)
class VerifyReport:
    """A scrub: every record read and checked."""

    checked: int
    bad: tuple[tuple[Key, Miss], ...]
    missing_in_index: int
    """Valid records that the index did not know."""
    dangling: int
    """Index rows without a valid record."""


@dataclass(frozen=True)
class CollectReport:
    """What one pass of expiry, adoption and eviction did."""

    expired_buckets: int = 0
    evicted_segments: int = 0
    adopted_segments: int = 0
    freed_bytes: int = 0
    refused: str = ""
    """Why nothing was done (another sweeper holds the election, the clock jumped), or empty."""


class Store(ABC):
    """One engine. Also a TierSource (entries.py)."""

    capabilities: Capabilities

    @property
    def name(self) -> str:
        """Label of this tier in metrics."""
        return "store"

    @abstractmethod
    def put_many(self, entries: Sequence[PutEntry]) -> PutTicket:
        """Queue entries, given prefix before suffix. Never blocks."""

    @abstractmethod
    def lookup(self, keys: Sequence[Key], deadline: float) -> Sequence[bool]:
        """Which keys the index knows unexpired; no payload is read. Failures answer False and are counted."""

    @abstractmethod
    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[GetResult]:
        """Verified payloads or misses, in order of `keys`. `deadline` is time.monotonic seconds."""

    @abstractmethod
    def touch(self, keys: Sequence[Key], retention: RetentionClass, tenant_tag: bytes) -> None:
        """A used prefix, blocks and snapshot, prefix first: counts for eviction, and what has under half of its life
        left, or a shorter class than `retention`, is re-appended in the background as one batch, deduplicated in
        flight. Never blocks. Engines without `refresh` only count."""

    @abstractmethod
    def find(self, keys: Sequence[Key], deadline: float) -> Sequence[StoredEntry | None]:
        """What the index says of each key (operators, refresh)."""

    def entries(self, deadline: float) -> Iterator[StoredEntry]:
        """What the index lists, unexpired, in no order: cheap beside `scan`, and a hint like all that an index says.

        Raises StoreError when the index does not answer, CapabilityMissing where there is no listing.
        """
        raise CapabilityMissing("entries")

    @abstractmethod
    def scan(self) -> Iterator[ScannedEntry]:
        """Every live entry as the stored bytes themselves tell, not the index. Raises CapabilityMissing."""

    @abstractmethod
    def drop_bucket(self, bucket: str) -> DropCount: ...

    @abstractmethod
    def drop_namespace(self, namespace: bytes) -> DropCount: ...

    @abstractmethod
    def drop_tenant(self, tenant_tag: bytes) -> DropCount:
        """Erase for privacy: unreadable when this returns and after any rebuild; bytes go at the latest with their
        bucket."""

    @abstractmethod
    def pin(self, keys: Sequence[Key]) -> int:
        """Keep entries until unpinned by dropping them; returns how many are kept. Raises CapabilityMissing, and
        StoreError when some may be kept and nobody can say yet."""

    @abstractmethod
    def collect(self) -> CollectReport:
        """One pass of the sweeper now (it also runs by itself)."""

    @abstractmethod
    def verify(self, progress: Callable[[int], None] = lambda done: None) -> VerifyReport:
        """Read and check everything; `progress` is told the records done."""

    @abstractmethod
    def stats(self) -> StoreStats: ...

    def identity(self) -> str:
        """Equal in processes that share this store now, and no others; empty when that cannot be told."""
        return ""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until everything accepted so far is durable or failed; False on timeout."""

    @abstractmethod
    def close(self) -> None:
        """Make durable what was accepted, then stop all threads. Idempotent."""
