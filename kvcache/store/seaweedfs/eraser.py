"""Take entries away: rows at once, needles as far as servers are up, and a record of it that rebuilds find."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.kvcache.cache_events import EventSink, Removed, Tier
from headrace.kvcache.entries import EntryInfo, EntryKind
from headrace.kvcache.index.base import Index, IndexRow, IndexUnavailable
from headrace.kvcache.store.base import DropCount, StoreError
from headrace.kvcache.store.seaweedfs.cluster import Cluster, ClusterError
from headrace.kvcache.store.seaweedfs.erasures import Erasure, covered
from headrace.kvcache.store.seaweedfs.http import Servers, ServerTimeout, ServerUnreachable
from headrace.kvcache.store.seaweedfs.known import KnownKeys
from headrace.kvcache.store.seaweedfs.needles import Needle, log_collection, needle_of
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.seaweedfs.ttl import FOREVER
from headrace.kvcache.store.segments.counters import Counters

OPERATOR_S = 60.0
"""Longest an operator's call waits for index, masters or one volume."""


class Eraser:
    """Thread-safe."""

    def __init__(
        self,
        settings: SeaweedSettings,
        servers: Servers,
        cluster: Cluster,
        index: Index,
        known: KnownKeys,
        counters: Counters,
        events: EventSink,
    ) -> None:
        self._settings = settings
        self._servers = servers
        self._cluster = cluster
        self._index = index
        self._known = known
        self._counters = counters
        self._events = events
        self._erasures: list[Erasure] = []

    @property
    def epoch(self) -> int:
        """Grows with every erasure: an entry that was accepted before one and is covered by it must not appear."""
        return len(self._erasures)

    def erased_since(self, epoch: int, info: EntryInfo) -> bool:
        """Whether an erasure after that epoch covers an entry that is being written."""
        return covered(self._erasures[epoch:], info, 0)

    def erase(self, erasure: Erasure) -> None:
        """Make an erasure durable, then binding for what is being written. StoreError: nothing was erased."""
        deadline = time.monotonic() + self._settings.write_timeout_s
        try:
            grant = self._cluster.assign(log_collection(self._settings.collection), FOREVER, 1, deadline)
            path = Needle(grant.volume, grant.first, grant.cookie).path
            reply = self._servers.call("PUT", grant.server, f"{path}?fsync=true", deadline, body=erasure.pack())
        except (ClusterError, ServerTimeout, ServerUnreachable) as error:
            raise StoreError(f"nothing was erased, since its record cannot be written: {error}; try again") from error
        if reply.status not in (200, 201):
            raise StoreError(f"nothing was erased: {grant.server} answered {reply.status} to its record; try again")
        self._erasures.append(erasure)

    def erase_rows(self, erasures: Sequence[Erasure]) -> None:
        """Erasures that other machines ordered: their rows go."""
        if erasures:
            self.drop(
                lambda group: True,
                lambda row: any(erasure.may_cover(row.tenant_tag, row.group) for erasure in erasures),
                delete=False,
            )

    def drop(
        self,
        groups: Callable[[str], bool],
        rows: Callable[[IndexRow], bool] = lambda row: True,
        *,
        delete: bool,
    ) -> DropCount:
        """Take rows of chosen groups out of the index, and their needles if asked. StoreError: the index does not
        answer."""
        dropped = snapshots = 0
        with ThreadPoolExecutor(self._settings.writers, "seaweed-delete") as threads:
            try:
                for group in self._index.groups(time.monotonic() + OPERATOR_S):
                    if not groups(group):
                        continue
                    gone = [row for row in self._index.rows_of(group, time.monotonic() + OPERATOR_S) if rows(row)]
                    self._index.remove_many(gone, time.monotonic() + OPERATOR_S)
                    self._removed(gone)
                    dropped += len(gone)
                    snapshots += sum(row.kind is EntryKind.SNAPSHOT for row in gone)
                    if delete:
                        list(threads.map(self._delete, gone))
            except IndexUnavailable as error:
                raise StoreError(f"the index does not answer: {error}; drop again when it does") from error
        return DropCount(blocks=dropped - snapshots, snapshots=snapshots)

    def forget(self, row: IndexRow) -> None:
        """A row that points to nothing, or to a spoilt record: nobody needs to try it again, and it may be written
        anew."""
        try:
            self._index.remove_many([row], time.monotonic() + self._settings.index_timeout_s)
        except IndexUnavailable:
            self._counters.failed("index")
            return
        self._removed([row])

    def _removed(self, rows: Sequence[IndexRow]) -> None:
        self._known.discard(row.key for row in rows)
        for kind in EntryKind:
            if keys := tuple(row.key for row in rows if row.kind is kind):
                self._events(Removed(kind, Tier.STORE, keys))

    def _delete(self, row: IndexRow) -> None:
        """Delete a needle in all its copies; a server that is away drops its copy when it expires."""
        needle = needle_of(row)
        if needle is None:
            return
        deadline = time.monotonic() + self._settings.write_timeout_s
        try:
            location = self._cluster.locations(needle.volume, deadline)[0]
            reply = self._servers.call("DELETE", location.server, needle.path, deadline)
        except (ClusterError, ServerTimeout, ServerUnreachable):
            self._counters.failed("delete")
            return
        if reply.status not in (200, 202, 404):
            self._counters.failed("delete")
