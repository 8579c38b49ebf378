"""The interface of an index. Thread-safe and, where several processes share one, process-safe.

Calls raise IndexUnavailable when the server does not answer before the deadline; stores turn that into misses (L17).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.kvcache.entries import TENANT_TAG_BYTES, EntryFieldError, EntryKind, RetentionClass
from headrace.kvcache.keys import KEY_BYTES, Key

MAX_PLACE = 1 << 127


class IndexUnavailable(Exception):
    """The index cannot be asked now."""


class IndexRow(NamedTuple):
    """Where one entry lies. Small: the whole index is in memory of some server. A tuple, since one is made for every
    record that is written, and a frozen dataclass takes three times as long to make (measured)."""

    key: Key
    group: str
    """What is dropped together: a segment's path relative to the store, a volume. Interned by implementations."""
    place: int
    """Inside the group: a byte offset (segments), needle id and cookie (SeaweedFS). Unsigned, below 2⁶⁴ … 2⁹⁶ where an
    engine says so; implementations store any non-negative integer below 2¹²⁷."""
    length: int
    """Payload bytes."""
    kind: EntryKind
    retention: RetentionClass
    tokens: int
    expires_at: int
    """Wall clock, whole seconds, rounded up; 0 never expires."""
    tenant_tag: bytes


def check_row(row: IndexRow) -> None:
    """Refuse, at the border of an index, a row that some implementation could not keep. Raises EntryFieldError."""
    if len(row.key) != KEY_BYTES or len(row.tenant_tag) != TENANT_TAG_BYTES:
        raise EntryFieldError(f"key and tenant tag must have {KEY_BYTES} and {TENANT_TAG_BYTES} bytes")
    if not row.group:
        raise EntryFieldError("a row needs a group")
    if not 0 <= row.place < MAX_PLACE:
        raise EntryFieldError(f"place {row.place} is not in [0, 2^127)")
    if not (0 < row.length < 1 << 32 and 0 < row.tokens < 1 << 32 and 0 <= row.expires_at < 1 << 32):
        raise EntryFieldError(f"length {row.length}, tokens {row.tokens} or expires_at {row.expires_at} is impossible")


@dataclass(frozen=True)
class IndexStats:
    entries: int
    groups: int
    nbytes: int
    """Memory or disk that the index takes, as the server tells."""


class Index(ABC):
    """key → IndexRow. A key has one row: the last put wins.

    Nothing here looks at expires_at: expiry is the store's, which drops whole groups."""

    @abstractmethod
    def put_many(self, rows: Sequence[IndexRow], deadline: float) -> None:
        """Insert or replace; all or nothing is not promised. Once it returns, the rows outlive whatever the generation
        outlives: SQLite's a power cut; Redis's nothing that ends the server, since a restart is a new generation."""

    @abstractmethod
    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[IndexRow | None]:
        """In order of `keys`. Rows may be stale: a reader verifies what it finds there."""

    def held(self, keys: Sequence[Key], deadline: float) -> Sequence[IndexRow | None]:
        """get_many past whatever this process remembers: for whoever decides by it what to write."""
        return self.get_many(keys, deadline)

    @abstractmethod
    def remove_many(self, rows: Sequence[IndexRow], deadline: float) -> int:
        """Remove rows that still point to the same group and place (compare and delete); returns how many went."""

    @abstractmethod
    def drop_group(self, group: str, deadline: float) -> Sequence[IndexRow]:
        """Remove every row of a group; returns them."""

    @abstractmethod
    def rows_of(self, group: str, deadline: float) -> Sequence[IndexRow]:
        """The rows of one group."""

    @abstractmethod
    def groups(self, deadline: float) -> Sequence[str]:
        """Every group that has rows."""

    @abstractmethod
    def scan(self, deadline: float) -> Iterator[IndexRow]:
        """All rows, in no order."""

    @abstractmethod
    def generation(self, deadline: float) -> str:
        """Changes when the contents were lost (a server that came back empty, a new file): time for a rebuild, whose
        doer is elected with `claim_rebuild`."""

    @abstractmethod
    def claim_rebuild(self, owner: str, ttl_s: float, deadline: float) -> bool:
        """Become, or stay, the only one who refills the index (a lease of `ttl_s`)."""

    @abstractmethod
    def finish_rebuild(self, owner: str, deadline: float) -> bool:
        """The index is complete again. False: the lease was lost meanwhile (it ran out, or the contents were lost once
        more), so the refill has to begin anew; `needs_rebuild` still says so."""

    @abstractmethod
    def needs_rebuild(self, deadline: float) -> bool:
        """The contents were lost, or were never there, and nobody has finished a rebuild since. A new index starts so:
        only its store knows whether there is anything to refill it from."""

    @abstractmethod
    def clear(self, deadline: float) -> None:
        """Forget every row on purpose: neither the generation nor `needs_rebuild` changes."""

    def wall(self, deadline: float) -> float | None:
        """Unix seconds by the clock of the server that hosts share; None where all users are on this machine."""
        return None

    @abstractmethod
    def stats(self, deadline: float) -> IndexStats: ...

    @abstractmethod
    def close(self) -> None: ...
