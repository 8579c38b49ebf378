"""How many bytes lie in which segment and whose they are: the accounting that pressure.py decides on.

Bytes are bytes on disk (header and padding included), so that sums are comparable with quotas. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.kvcache.keys import Key
from headrace.kvcache.store.retention.heat import tick


@dataclass(frozen=True, slots=True)
class Placed:
    """Where an entry lies now."""

    key: Key
    segment: str
    tenant: bytes
    """Tag of the tenant that stored it."""
    nbytes: int


@dataclass(slots=True)
class SegmentUse:
    """One segment."""

    name: str
    pinned: bool = False
    """Holds pinned entries: never given up."""
    open: bool = True
    """Still written: not given up now."""
    disk_bytes: int = 0
    """What unlinking it frees."""
    written: int = 0
    """Tick of the last append of something new."""
    live: Counter[bytes] = field(default_factory=Counter)
    """Bytes of the entries that the index finds here, by tenant."""

    @property
    def live_bytes(self) -> int:
        return sum(self.live.values())


class Ledger:
    """All segments of a store."""

    def __init__(self) -> None:
        self.segments: dict[str, SegmentUse] = {}
        self.disk_bytes = 0
        self.tenant_bytes: Counter[bytes] = Counter()
        """Live bytes of each tenant: what its quota counts."""

    def add(self, segment: SegmentUse) -> None:
        """A segment, new or as found."""
        if segment.name in self.segments:
            raise ValueError(f"segment {segment.name} is known already; names are never used twice")
        self.segments[segment.name] = segment
        self.disk_bytes += segment.disk_bytes
        self.tenant_bytes.update(segment.live)

    def seal(self, name: str) -> None:
        """Nothing more is appended."""
        self.segments[name].open = False

    def append(self, name: str, tenant: bytes, nbytes: int, now: float) -> None:
        """A new entry stands in the segment."""
        segment = self.segments[name]
        self._grow(segment, tenant, nbytes)
        segment.written = max(segment.written, tick(now))

    def move(self, tenant: bytes, nbytes: int, source: str, target: str) -> None:
        """An entry was appended again, in `target`."""
        self._grow(self.segments[target], tenant, nbytes)
        self.remove(source, tenant, nbytes)

    def remove(self, name: str, tenant: bytes, nbytes: int) -> None:
        """The index no longer finds an entry there; its bytes stay until the segment goes."""
        self.segments[name].live[tenant] -= nbytes
        self.tenant_bytes[tenant] -= nbytes

    def unlink(self, name: str) -> None:
        """The segment's file is gone and nothing points to it."""
        segment = self.segments.pop(name)
        self.disk_bytes -= segment.disk_bytes
        self.tenant_bytes.subtract(segment.live)

    def problems(self) -> Iterable[str]:
        """What does not add up (L11); empty when sound."""
        disk = sum(segment.disk_bytes for segment in self.segments.values())
        if disk != self.disk_bytes:
            yield f"segments take {disk} bytes, the sum says {self.disk_bytes}"
        live: Counter[bytes] = Counter()
        for segment in self.segments.values():
            live.update(segment.live)
            if segment.live_bytes > segment.disk_bytes:
                yield f"{segment.name} holds {segment.live_bytes} live bytes on {segment.disk_bytes} of disk"
            if any(nbytes < 0 for nbytes in segment.live.values()):
                yield f"{segment.name} lost more than it held"
        if +live != +self.tenant_bytes:
            yield "live bytes by tenant do not add up"

    def _grow(self, segment: SegmentUse, tenant: bytes, nbytes: int) -> None:
        segment.disk_bytes += nbytes
        segment.live[tenant] += nbytes
        self.disk_bytes += nbytes
        self.tenant_bytes[tenant] += nbytes
