"""How one process uses a mounted 3FS."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.threefs.abi import DEFAULT_LIBRARY
from headrace.kvcache.store.threefs.breaker import BreakerSettings

MIB = 1 << 20


@dataclass(frozen=True)
class ThreeFsSettings:
    library: str = DEFAULT_LIBRARY
    """Path of libhf3fs_api_shared.so, or its name when the loader finds it."""
    read_bytes: int = 64 * MIB
    """Shared memory for reads: what can be in flight and late together."""
    write_bytes: int = 32 * MIB
    slot_bytes: int = MIB // 2
    """Piece of that memory, and of one I/O: a read of 2 MiB is four I/Os side by side. A divisor of the chunk size
    (4 MiB) keeps aligned pieces inside one chunk."""
    io_timeout_s: float = 10.0
    """Of reads without a deadline (rebuild, scrub) and of writes; 3FS itself retries for 60 s."""
    sync_timeout_s: float = 30.0
    name_timeout_s: float = 5.0
    """Of open, create, rename and the like."""
    name_threads: int = 4
    new_name_s: float = 5.0
    """How long the mount may remember that a name is missing after another host has made it."""
    connect_timeout_s: float = 10.0
    breaker: BreakerSettings = field(default_factory=BreakerSettings)

    def __post_init__(self) -> None:
        if self.slot_bytes < 4096 or self.slot_bytes % 4096:
            raise StoreError(f"slot_bytes {self.slot_bytes} must be a multiple of 4,096")
        for name in ("read_bytes", "write_bytes"):
            if getattr(self, name) < 2 * self.slot_bytes:
                raise StoreError(f"{name} must hold two slots of {self.slot_bytes} bytes at least")
        for name in ("io_timeout_s", "sync_timeout_s", "name_timeout_s", "connect_timeout_s"):
            if getattr(self, name) <= 0:
                raise StoreError(f"{name} must be positive")
        if self.name_threads < 1 or self.new_name_s < 0:
            raise StoreError("name_threads must be at least 1, new_name_s not negative")
