"""What every tier below the device pool stores: entries, their description, and how a read of one ends.

An entry is a block or a snapshot under its key (keys.py). Everything a tier must know of it stands in EntryInfo, which
a record's header repeats, so that a tier can be rebuilt and verified from its own bytes (L3). No torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from headrace.kvcache.keys import KEY_BYTES, Key

TENANT_TAG_BYTES = 16
DIGEST_BYTES = 16


class EntryKind(enum.IntEnum):
    """What a key names; numbers are those of the wire (events.proto) and of record headers."""

    BLOCK = 1
    SNAPSHOT = 2


class RetentionClass(enum.IntEnum):
    """How long the store keeps an entry after its last refresh (spec/kv_tier.md). BATCH traffic stores nothing."""

    AGENT = 1
    CHAT = 2
    PINNED = 3


class EntryFieldError(ValueError):
    """A field of an entry is impossible; the message says which and why."""


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry as its writer describes it."""

    key: Key
    kind: EntryKind
    namespace: bytes
    """32 bytes (keys.namespace)."""
    parent: Key
    """Block: key of the block before it, or the root key. Snapshot: key of the block at whose end it was taken."""
    tokens: int
    """Position at the end of the entry: P of a snapshot, a multiple of block_tokens."""
    length: int
    """Payload bytes."""
    digest: bytes
    """xxh3-128 of the payload (payload_digest)."""
    retention: RetentionClass
    tenant_tag: bytes
    """16 bytes (RequestSpec.tenant_tag): quotas and erasure."""

    def __post_init__(self) -> None:
        if not (
            len(self.key) == len(self.namespace) == len(self.parent) == KEY_BYTES
            and len(self.digest) == DIGEST_BYTES
            and len(self.tenant_tag) == TENANT_TAG_BYTES
        ):
            for name, value, size in (
                ("key", self.key, KEY_BYTES),
                ("namespace", self.namespace, KEY_BYTES),
                ("parent", self.parent, KEY_BYTES),
                ("digest", self.digest, DIGEST_BYTES),
                ("tenant_tag", self.tenant_tag, TENANT_TAG_BYTES),
            ):
                if len(value) != size:
                    raise EntryFieldError(f"{name} has {len(value)} bytes; it must have {size}")
        if self.length < 1 or not 0 < self.tokens < 1 << 32:
            raise EntryFieldError(f"length {self.length} and tokens {self.tokens} must be positive")


def payload_digest(payload: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of the payload, 16 bytes: what record headers, the host tier and peers verify (L3)."""
    return xxhash.xxh3_128_digest(payload)


class Miss(enum.Enum):
    """Why an entry did not come. Every failure of a tier is a miss counted by cause (L17); none is an exception."""

    ABSENT = "absent"
    """The tier does not know the key."""
    EXPIRED = "expired"
    DROPPED = "dropped"
    """Erased: its namespace, tenant or bucket is gone."""
    TIMEOUT = "timeout"
    """The deadline passed first; a late completion is discarded."""
    SHORT = "short"
    """Fewer bytes than a whole record."""
    HEADER = "header"
    """Magic, version, header checksum, key or length differ."""
    DIGEST = "digest"
    """The payload is not the one that was written."""
    HOLE = "hole"
    """The file system had no data there."""
    NOT_CONNECTED = "not_connected"
    """Server, mount or peer cannot be reached; also while a circuit breaker is open."""
    SERVER = "server"
    """The server answered with an error of its own (HTTP 5xx, EIO)."""
    BUSY = "busy"
    """No read buffer was free."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified payload in memory of the tier. Whoever gets one calls `release` exactly once, after copying."""

    info: EntryInfo
    payload: memoryview
    """Read-only, info.length bytes; valid until release."""
    release: Callable[[], None]


GetResult = Loaded | Miss


class TierSource(Protocol):
    """Where prefixes can be loaded from: the own host tier, a peer's, the store. Thread-safe; blocks at most until
    `deadline` (time.monotonic seconds)."""

    @property
    def name(self) -> str:
        """`host`, `store`, or `peer` (label of metrics)."""
        ...

    def lookup(self, keys: Sequence[Key], deadline: float) -> Sequence[bool]:
        """Which keys are probably there: a hint, without reading payloads. Failures answer False and are counted."""
        ...

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[GetResult]:
        """One result per key, in order. Nothing unverified is returned (L3); never raises for a failed read."""
        ...
