"""What the store does by itself: refresh used prefixes, forget what has expired, try servers that were away."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from headrace.kvcache.cache_events import BucketDropped, EventSink
from headrace.kvcache.entries import Loaded, RetentionClass
from headrace.kvcache.index.base import Index, IndexRow, IndexUnavailable
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import CollectReport, StoreError, WallClock
from headrace.kvcache.store.retention.classes import Lives, expired
from headrace.kvcache.store.retention.refresh import Refresh, Refresher, UsedEntry
from headrace.kvcache.store.seaweedfs.erasure_watch import ErasureWatch
from headrace.kvcache.store.seaweedfs.http import Servers
from headrace.kvcache.store.seaweedfs.needles import bucket_of
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.segments.counters import Counters

_log = logging.getLogger(__name__)
_PROBE_S = 0.5
"""Between looks at servers that did not answer."""
_MAX_TOUCHES = 1_024
"""Uses that wait to be looked at; beyond it the oldest are forgotten, which costs a refresh and never a hit now."""

Rewrite = Callable[[Loaded, RetentionClass, int], Future[tuple[bool, ...]] | None]
"""Queue a record again as of a class, if nothing erased it since that epoch; None if the queue has no room."""


class Upkeep:
    """One thread. Everything it is told never blocks the teller."""

    def __init__(
        self,
        settings: SeaweedSettings,
        servers: Servers,
        index: Index,
        lives: Lives,
        counters: Counters,
        events: EventSink,
        wall: WallClock,
        read: Callable[[IndexRow, float], Loaded | None],
        rewrite: Rewrite,
        epoch: Callable[[], int],
        erasures: ErasureWatch | None,
    ) -> None:
        self._settings = settings
        self._servers = servers
        self._index = index
        self._counters = counters
        self._events = events
        self._wall = wall
        self._read = read
        self._rewrite = rewrite
        self._epoch = epoch
        self._erasures = erasures
        self._changed = threading.Condition()
        self._touches: deque[tuple[tuple[Key, ...], RetentionClass]] = deque(maxlen=_MAX_TOUCHES)
        self._busy = False
        self._closed = False
        self._refresher = Refresher(lives)
        self._refresher_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="seaweed-upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def touch(self, keys: Sequence[Key], retention: RetentionClass) -> None:
        """A prefix was used by a class."""
        with self._changed:
            self._touches.append((tuple(keys), retention))
            self._changed.notify_all()

    def settle_touches(self, timeout_s: float) -> bool:
        """Wait until every use told so far was looked at and its rewrites are queued."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or not (self._touches or self._busy), timeout_s)

    @property
    def refreshing(self) -> int:
        """Entries whose rewrites are not settled yet."""
        with self._refresher_lock:
            return self._refresher.in_flight

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def collect(self) -> CollectReport:
        """Take the rows of expired buckets out of the index; the volume servers drop the bytes by themselves."""
        now = self._wall()
        dropped: dict[str, int] = {}
        try:
            for group in self._index.groups(self._deadline()):
                bucket = bucket_of(group)
                if bucket is not None and expired(bucket.end, now):
                    rows = self._index.drop_group(group, self._deadline())
                    dropped[bucket.name] = dropped.get(bucket.name, 0) + len(rows)
        except IndexUnavailable as error:
            return CollectReport(expired_buckets=len(dropped), refused=f"the index does not answer: {error}")
        finally:
            self._counters.add(expired_entries=sum(dropped.values()))
            for name in dropped:
                self._events(BucketDropped(name))
        return CollectReport(expired_buckets=len(dropped))

    def _run(self) -> None:
        sweep_at = time.monotonic() + self._settings.sweep_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._touches), _PROBE_S)
                if self._closed:
                    return
                touch = self._touches.popleft() if self._touches else None
                self._busy = touch is not None
            if touch is not None:
                self._try("refresh a used prefix", partial(self._refresh, *touch))
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
            self._try("ask servers that were away", partial(self._servers.probe, self._settings.read_attempt_s))
            if time.monotonic() >= sweep_at:
                self._try("take out what has expired", self.collect)
                if self._erasures is not None:
                    self._try("carry out erasures of other machines", self._erasures.look)
                sweep_at = time.monotonic() + self._settings.sweep_s

    @staticmethod
    def _try(what: str, work: Callable[[], object]) -> None:
        """A chore that fails is done at the next turn; none ends the thread (L9)."""
        try:
            work()
        except (IndexUnavailable, StoreError) as error:
            _log.info("could not %s: %s", what, error)
        except Exception:  # noqa: BLE001 - the boundary: whatever one chore does, the others go on
            _log.exception("could not %s", what)

    def _refresh(self, keys: tuple[Key, ...], used_by: RetentionClass) -> None:
        """Write again what of a used prefix has under half of its life left, or belongs to a shorter class."""
        epoch = self._epoch()
        rows = {key: row for key, row in zip(keys, self._index.get_many(keys, self._deadline()), strict=True) if row}
        used = [UsedEntry(row.key, row.retention, row.expires_at) for row in rows.values()]
        with self._refresher_lock:
            batch = self._refresher.plan(used, used_by, self._wall())
        for refresh in batch:
            loaded = self._read(rows[refresh.key], time.monotonic() + self._settings.write_timeout_s)
            written = self._rewrite(loaded, refresh.retention, epoch) if loaded is not None else None
            if written is None:
                self._done(refresh)
            else:
                written.add_done_callback(lambda _, refresh=refresh: self._done(refresh))  # type: ignore[misc]

    def _done(self, refresh: Refresh) -> None:
        with self._refresher_lock:
            self._refresher.done([refresh])

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.index_timeout_s
