"""Settings of the segment engine, and the callables it is given."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.segments.names import node_name
from headrace.kvcache.store.segments.record import ALIGN, HEADER_BYTES

MIB = 1 << 20

Liveness = Callable[[str], bool]
"""Whether the writer `<node>-<boot>` still runs, by evidence: a held lock, a registry lease. Never by a file's age."""


class ExpiryBuckets(Protocol):
    """When what is written now ends (retention.classes.Lives)."""

    def bucket(self, retention: RetentionClass, now: float) -> int:
        """Unix second: the bucket's name and the expires_at of everything in it; 0 never."""
        ...


@dataclass(frozen=True)
class SegmentSettings:
    """How one process uses a store directory. Several processes may share it, each with its own boot id."""

    node: str = field(default_factory=lambda: node_name(socket.gethostname()))
    boot: str = field(default_factory=lambda: secrets.token_hex(8))
    """Hexadecimal; new at every start, so that a restarted process is another writer (L14)."""
    segment_bytes: int = 256 * MIB
    """Of the largest segment; a store with little room has smaller ones (quotas.py)."""
    queue_bytes: int = 256 * MIB
    """Accepted records that are not written yet."""
    read_buffer_bytes: int = 256 * MIB
    read_threads: int = 8
    read_bytes: int = 2 * MIB
    """Most bytes of one preadv: adjacent records are read together, and a large read is spread over the threads."""
    write_threads: int = 4
    write_bytes: int = 2 * MIB
    """Most bytes of one pwritev."""
    sync_bytes: int = 64 * MIB
    sync_interval_s: float = 1.0
    """A group of writes is made durable when it has this many bytes or is this old."""
    sync_idle_s: float = 0.1
    """… or when nothing more came for so long."""
    busy_wait_s: float = 0.05
    """How long a read waits for a buffer that another request holds before it is a miss (BUSY)."""
    index_timeout_s: float = 0.5
    """For index calls of callers who gave no deadline: put_many, pin, stats."""
    index_patience_s: float = 5.0
    """For those of background threads: a slow disk or a busy machine must not turn durable records into lost ones. An
    index that is gone says so at once."""
    open_files: int = 256
    tick_s: float = 1.0
    """How often files that nobody reads are closed and unlinked."""
    sweep_s: float = 60.0
    """How often the elected process expires and adopts."""
    erasure_poll_s: float = 0.0
    """An erasure by another process is seen at a read that comes so long after the last look; 0: at every read, which
    costs one system call on a local disk. A network mount wants a second."""
    capacity_bytes: int = 0
    """Of the store; 0: no limit but the disk."""
    tenant_bytes: int = 0
    """Of one tenant; 0: no limit."""

    def __post_init__(self) -> None:
        if self.segment_bytes < 2 * HEADER_BYTES or self.segment_bytes % ALIGN:
            raise StoreError(f"segment_bytes {self.segment_bytes} must be a multiple of {ALIGN}, at least 8,192")
        for name in (
            "queue_bytes",
            "read_buffer_bytes",
            "read_threads",
            "read_bytes",
            "write_threads",
            "write_bytes",
            "open_files",
        ):
            if getattr(self, name) < 1:
                raise StoreError(f"{name} must be positive")
        if not self.boot or set(self.boot) - set("0123456789abcdef"):
            raise StoreError(f"boot id {self.boot!r} must be lower-case hexadecimal")
        if node_name(self.node) != self.node:
            raise StoreError(f"node {self.node!r} may have letters, digits, '_' and '.' only")

    @property
    def writer(self) -> str:
        """This process as segment names and its lock file say it."""
        return f"{self.node}-{self.boot}"
