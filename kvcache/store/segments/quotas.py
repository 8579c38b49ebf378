"""What may be written: the disk's quota and each tenant's, as far as this process knows.

The disk grows when a segment is opened, by its preallocated size: there it is asked for, and never beyond the quota. A
segment is as large as suits the room that the store has just now, at most as the settings say: a small disk takes many
small ones instead of none.
What others opened is known from listing the files, so a store of several processes may pass its quota by what they open
in ten seconds; the space above the high mark is there for that. A tenant's bytes are those in the index, which the
sweeper looks at as a whole in each sweep, and others as often while a tenant is near its quota, and those this process
has in flight.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from headrace.kvcache.store.files import FileLayer
from headrace.kvcache.store.retention.pressure import Quota
from headrace.kvcache.store.retention.pressure import segment_bytes as suiting
from headrace.kvcache.store.segments.disk_use import DiskMeter, DiskUse
from headrace.kvcache.store.segments.own_segments import OwnSegments
from headrace.kvcache.store.segments.pending import WriteQueue
from headrace.kvcache.store.segments.table import SegmentTable

MEASURE_S = 10.0
"""How often a process lists the store's files."""


class Quotas:
    """Thread-safe."""

    def __init__(
        self,
        files: FileLayer,
        table: SegmentTable,
        entries: WriteQueue,
        own: OwnSegments,
        segment_bytes: int,
        capacity_bytes: int,
        tenant_bytes: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`segment_bytes`: of the largest segment. Zero capacity: what the store has and what its disk has free. Zero
        tenant bytes: no limit."""
        self._files = files
        self._table = table
        self._entries = entries
        self._own = own
        self._segment_bytes = segment_bytes
        self._meter = DiskMeter(files)
        self._capacity = capacity_bytes
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._measuring = threading.Lock()
        self._quota = Quota(capacity_bytes or 1 << 62, tenant_bytes or None)
        self._held = 0
        self._opening: dict[str, int] = {}
        """Own segments that no measurement has seen yet, and their bytes."""
        self._full = False
        """A segment was refused, and nothing has been freed since."""
        self._measured_at = float("-inf")
        self._rest_until = float("-inf")

    @property
    def quota(self) -> Quota:
        """The limits of now: never more than the disk can give."""
        with self._lock:
            return self._quota

    @property
    def full(self) -> bool:
        """A segment was refused, and nothing has been freed since."""
        with self._lock:
            return self._full

    def room(self, tenant_tag: bytes) -> float:
        """Record bytes that a tenant may add now: infinite without a quota of its own, 0 while the disk is full."""
        with self._lock:
            quota, full = self._quota, self._full
        limit = quota.of(tenant_tag)
        if full:
            return 0.0
        if limit is None:
            return float("inf")
        return float(limit - self._table.tenant_bytes(tenant_tag) - self._entries.tenant_bytes(tenant_tag))

    def open_segment(self, path: str, least: int = 0) -> int:
        """The bytes that this segment, which is among the own ones already, may have, at least `least`; they then
        count. OSError: EDQUOT when there is no room, or if the files cannot be listed."""
        if self._measured_at == float("-inf"):
            self.measure()
        size = self._charge(path, least)
        if size is None:
            self.measure()
            size = self._charge(path, least)
        if size is None:
            with self._lock:
                self._full = True
                room, taken = self._quota.disk_bytes, self._taken()
            raise OSError(
                errno.EDQUOT,
                f"{taken:,} of {room:,} bytes are taken, and another segment does not fit: give cache.quota_bytes or "
                "the disk more room",
            )
        return size

    def _charge(self, path: str, least: int) -> int | None:
        with self._lock:
            size = max(self._size(), least)
            if self._taken() + size > self._quota.disk_bytes:
                return None
            self._opening[path] = size
            return size

    def _size(self) -> int:
        return min(self._segment_bytes, suiting(self._quota.disk_bytes))

    def _taken(self) -> int:
        return self._held + sum(self._opening.values())

    def measure(self) -> DiskUse:
        """Look at the files now. OSError if they cannot be listed."""
        with self._measuring:
            use = self._meter.measure()
            room = use.nbytes + self._files.free_bytes()
            seen = {segment.name.path for segment in use.segments}
            with self._lock:
                self._held = use.nbytes
                # What was not listed and is not given up either was made after its directory was looked at.
                own = self._own.paths()
                self._opening = {p: size for p, size in self._opening.items() if p not in seen and p in own}
                self._quota = replace(self._quota, disk_bytes=max(min(self._capacity or room, room), 1))
                self._full = self._full and self._taken() + self._size() > self._quota.disk_bytes
                self._measured_at = self._monotonic()
        return use

    def relieved(self) -> None:
        """A pass of eviction found nothing to free. If there still is pressure, the next pass can wait."""
        if self.pressing():
            with self._lock:
                self._rest_until = self._monotonic() + MEASURE_S

    def pressing(self) -> bool:
        """Whether a pass of eviction is due, looking at the files if it is time. OSError if they cannot be listed."""
        with self._lock:
            if self._monotonic() < self._rest_until:
                return False
            stale = self._monotonic() - self._measured_at >= MEASURE_S
        if stale:
            self.measure()
        with self._lock:
            quota = self._quota
            if self._full or self._taken() > quota.high * quota.disk_bytes:
                return True
        return self.tenants_press()

    def tenants_press(self) -> bool:
        """Whether a tenant is near its quota, or over it, as far as this process knows."""
        quota = self.quota
        return any(
            (limit := quota.of(tenant)) is not None and held > quota.high * limit
            for tenant, held in self._table.tenants().items()
        )
