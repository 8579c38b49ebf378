"""The housekeeping thread: unlinks what nobody reads, and, in the one process that is elected, expires and adopts.

The election is a lock file, held while the process lives. Nothing is swept while the clock cannot be trusted
(retention/sweep.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.kvcache.cache_events import BucketDropped, EventSink
from headrace.kvcache.index.base import Index, IndexUnavailable
from headrace.kvcache.store.base import CollectReport, StoreError, WallClock
from headrace.kvcache.store.files import FileLayer, StoreFile
from headrace.kvcache.store.retention.classes import expired
from headrace.kvcache.store.retention.sweep import ClockGuard, ClockReading
from headrace.kvcache.store.segments.adoption import Adoption
from headrace.kvcache.store.segments.counters import Counters
from headrace.kvcache.store.segments.erasures import Erasures
from headrace.kvcache.store.segments.names import GONE_SUFFIX, ROOT, SUFFIX, Bucket, SegmentName, bucket_name
from headrace.kvcache.store.segments.recovery import find_buckets, find_segments
from headrace.kvcache.store.segments.unlinking import Unlinking

_log = logging.getLogger(__name__)
_ELECTION = "sweeper.lock"


@dataclass(frozen=True)
class Relief:
    """What pressure eviction did."""

    segments: int = 0
    freed_bytes: int = 0


class Sweeper:
    """`pass_now` may be called from any thread; one pass at a time."""

    def __init__(
        self,
        files: FileLayer,
        index: Index,
        unlinking: Unlinking,
        adoption: Adoption,
        erasures: Erasures,
        counters: Counters,
        events: EventSink,
        wall: WallClock,
        relieve: Callable[[], Relief],
        reload: Callable[[], None],
        tick: Callable[[], None],
        pressing: Callable[[], bool],
        tenants_press: Callable[[], bool],
        passing: threading.Lock,
        *,
        tick_s: float,
        sweep_s: float,
        index_timeout_s: float,
    ) -> None:
        """`relieve`: pressure eviction. `reload`: look at the index again before deciding. `tick`: what this process
        does every `tick_s` for itself, elected or not. `pressing`: whether pressure eviction cannot wait.
        `tenants_press`: whether a tenant is near its quota, as far as this process knows. `passing`: held during a
        pass, and by erasures."""
        self._files = files
        self._index = index
        self._unlinking = unlinking
        self._adoption = adoption
        self._erasures = erasures
        self._counters = counters
        self._events = events
        self._wall = wall
        self._relieve = relieve
        self._reload = reload
        self._tick = tick
        self._pressing = pressing
        self._tenants_press = tenants_press
        self._tick_s = tick_s
        self._sweep_s = sweep_s
        self._index_timeout_s = index_timeout_s
        self._guard = ClockGuard()
        self._pass_lock = passing
        self._elected: StoreFile | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The pass at hand ends first."""
        self._stop.set()
        self._thread.join()
        with self._pass_lock:
            if self._elected is not None:
                self._elected.close()
                self._elected = None

    @property
    def elected(self) -> bool:
        """Whether this process was the sweeper when it last looked."""
        return self._elected is not None

    def pass_now(self) -> CollectReport:
        """One pass; `refused` says why there was none."""
        with self._pass_lock:
            if self._elected is not None and not self._elected.held():
                _log.warning("another process took over as the sweeper of this store")
                self._elected.close()
                self._elected = None
            if self._elected is None:
                self._elected = self._files.lock(_ELECTION)
            if self._elected is None:
                return CollectReport(refused="another process of this store is its sweeper; ask that one")
            shared = self._index.wall(time.monotonic() + self._index_timeout_s)
            refusal = self._guard.refusal(ClockReading(self._wall(), time.monotonic(), shared))
            if refusal:
                return CollectReport(refused=refusal)
            self._reload()
            buckets = self._expire()
            self._finish_unlinking()
            try:
                adopted = self._adoption.run()
            finally:
                # A segment that cannot be adopted must not let the disk fill up.
                relief = self._relieve()
            self._unlinking.reap()
            return CollectReport(buckets, relief.segments, adopted.segments, relief.freed_bytes)

    def _run(self) -> None:
        next_pass = time.monotonic()
        while not self._stop.is_set():
            try:
                self._tick()
                self._unlinking.reap()
                pressing = self._pressing()
                if time.monotonic() >= next_pass or (pressing and self._elected is not None):
                    next_pass = time.monotonic() + self._sweep_s
                    self.pass_now()
                    if self._elected is None and self._tenants_press():
                        # What the sweeper took from them meanwhile is known only from the index.
                        self._reload()
            except (OSError, IndexUnavailable, StoreError) as error:
                _log.warning("sweeping broke off and is tried again: %s", error)
            except Exception:  # noqa: BLE001 - the boundary: whatever one pass raises, the next one comes (L9)
                _log.exception("sweeping broke off and is tried again")
            self._stop.wait(self._tick_s)

    def _expire(self) -> int:
        """Unlink whole buckets that have ended; nobody writes to one that is past."""
        now = self._wall()
        ended = {bucket for bucket in find_buckets(self._files) if expired(bucket.end, now)}
        for group in self._index.groups(time.monotonic() + self._index_timeout_s):
            # Rows may outlive their file: somebody removed the directory by hand.
            bucket = Bucket.parse(bucket_name(group))
            if bucket is not None and expired(bucket.end, now):
                ended.add(bucket)
                self._counters.add(expired_entries=len(self._unlinking.drop(group)))
        for bucket in sorted(ended):
            self._clear(bucket)
            self._events(BucketDropped(bucket.name))
        return len(ended)

    def _clear(self, bucket: Bucket) -> None:
        for found in find_segments(self._files, bucket):
            self._counters.add(expired_entries=len(self._unlinking.drop(found.name.path)))
        self._unlinking.reap()
        for name in self._files.list(bucket.directory):
            if not name.endswith((SUFFIX, GONE_SUFFIX)):
                # Sidecars whose segment is gone, parts of sidecars.
                self._files.unlink(f"{bucket.directory}/{name}")
        self._unlinking.remove_if_empty(bucket.directory)

    def _finish_unlinking(self) -> None:
        """What a process that died had begun, and segments that an erasure covers as a whole."""
        for bucket in find_buckets(self._files):
            names = set(self._files.list(bucket.directory))
            for name in names:
                stem, dot, suffix = name.rpartition(".")
                path = f"{bucket.directory}/{stem}{SUFFIX}"
                if dot + suffix == GONE_SUFFIX:
                    self._unlinking.drop(path)
                elif dot + suffix == SUFFIX and f"{stem}.idx" in names:
                    segment = SegmentName.parse(path)
                    self._erasures.refresh({path})
                    if segment is not None and self._erasures.covers_all(path):
                        self._unlinking.drop(path)
        for namespace in self._files.list(ROOT):
            for retention in self._files.list(f"{ROOT}/{namespace}"):
                self._unlinking.remove_if_empty(f"{ROOT}/{namespace}/{retention}")
