"""The cache tier's settings as a section of a worker's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import ByteSize, Field

from headrace.kvcache.store.open import StoreSettings
from headrace.kvcache.tier.load import LoadSettings
from headrace.services.runtime.settings import Section

MIB = 1 << 20


class CacheSection(Section):
    """Where computed prefixes are kept beyond the device pool. Without a store and host memory there is no tier."""

    store: str = ""
    """Store of prefixes: `file:///directory` (a local disk or a mounted file system), `3fs:///mount/directory` or
    `seaweedfs://host:port,…` (docs/stores.md); empty: none. Workers of one cluster share it."""
    index: str = "sqlite"
    """Index of the store: `sqlite` (beside it, one machine), `sqlite:///file`, `redis://host:port/0`,
    `rediss://host:port/0`."""
    local_directory: str = ""
    """This machine's own folder for an SQLite index; empty: the store's directory, which must then be a local disk."""
    name: str = Field(default="store", min_length=1)
    """Stores that share an index server differ in it."""
    quota_bytes: ByteSize = Field(default=ByteSize(0), ge=0)
    """Of the store; above 90 % of it entries are evicted down to 80 %. 0: what the disk has."""
    tenant_quota_bytes: ByteSize = Field(default=ByteSize(0), ge=0)
    """Of one tenant in the store; 0: no limit."""
    segment_bytes: ByteSize = Field(default=ByteSize(0), ge=0)
    """Of the largest segment file; 0: 256 MiB. Segments take 1/128 of what the store may hold (its quota, or what its
    disk has), from 4 MiB up to this."""
    queue_bytes: ByteSize = Field(default=ByteSize(64 * MIB), ge=MIB)
    """Entries taken and not yet written; more are refused, suffixes first (L12)."""
    read_buffer_bytes: ByteSize = Field(default=ByteSize(64 * MIB), ge=MIB)
    """Entries read and not yet copied to the device pool."""
    read_threads: int = Field(default=8, ge=1)
    """Threads that read from the store."""
    host_bytes: ByteSize = Field(default=ByteSize(0), ge=0)
    """Host memory of this worker for prefixes; 0: none. `headrace up` gives each worker its share."""
    host_budget_directory: Path | None = None
    """Folder of this machine in which its workers divide the host's memory among them: host_bytes is then the most that
    this one takes. None: host_bytes is taken as it is, since a launcher has divided the memory (L29)."""
    peers: bool = True
    """Read from the host memory of other workers of the model, and let them read from this one's."""
    peer_buffer_bytes: ByteSize = Field(default=ByteSize(32 * MIB), ge=0)
    """Where entries of peers arrive."""
    load_deadline_ms: int = Field(default=500, ge=1)
    """For the lookups and the first bytes of a load (L17); what has not come in its time is computed."""
    least_load_bytes_per_second: ByteSize = Field(default=ByteSize(200_000_000), ge=1)
    """A load may take this much longer per byte that it is to bring."""
    min_load_tokens: int = Field(default=256, ge=0)
    """Smaller gains are computed."""
    break_even: bool = True
    """Load only what is quicker to load than to compute, as this worker has measured both."""
    read_bytes: ByteSize = Field(default=ByteSize(4 * MIB), ge=4096)
    """Of one read during a load."""
    load_window: int = Field(default=4, ge=1)
    """Reads of one load in flight."""
    max_loads: int = Field(default=16, ge=1)
    """Loads at once; more wait, within their deadline."""
    flush_seconds: float = Field(default=5.0, ge=0)
    """Longest wait for the store to make everything durable when the process ends."""

    @property
    def enabled(self) -> bool:
        """There is a tier to read from or to write to."""
        return bool(self.store) or self.host_bytes > 0

    def load_settings(self) -> LoadSettings:
        """As kvcache.tier wants them."""
        return LoadSettings(
            deadline_s=self.load_deadline_ms / 1000,
            least_bytes_per_second=float(self.least_load_bytes_per_second),
            least_tokens=self.min_load_tokens,
            break_even=self.break_even,
            read_bytes=int(self.read_bytes),
            window=self.load_window,
        )

    def store_settings(self) -> StoreSettings:
        """As kvcache.store wants them."""
        return StoreSettings(
            url=self.store,
            index=self.index,
            local_directory=self.local_directory,
            name=self.name,
            capacity_bytes=int(self.quota_bytes),
            tenant_bytes=int(self.tenant_quota_bytes),
            queue_bytes=int(self.queue_bytes),
            read_buffer_bytes=int(self.read_buffer_bytes),
            read_threads=self.read_threads,
            segment_bytes=int(self.segment_bytes),
        )
