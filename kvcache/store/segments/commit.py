"""The commit thread: sync a group, tell the index, then everybody (accepted becomes durable)."""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from headrace.kvcache.cache_events import EventSink, Stored, Tier
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.index.base import Index, IndexRow, IndexUnavailable
from headrace.kvcache.keys import Key
from headrace.kvcache.store.segments.counters import Counters
from headrace.kvcache.store.segments.groups import Group
from headrace.kvcache.store.segments.names import bucket_name
from headrace.kvcache.store.segments.open_segment import OpenSegment
from headrace.kvcache.store.segments.own_segments import OwnSegments
from headrace.kvcache.store.segments.pending import Pending, WriteQueue, settle
from headrace.kvcache.store.segments.record import Header
from headrace.kvcache.store.segments.sealing import Sealer
from headrace.kvcache.store.segments.table import SegmentTable
from headrace.kvcache.store.segments.writer import Fail, cause_of

_log = logging.getLogger(__name__)


def row_of(header: Header, group: str) -> IndexRow:
    """What the index keeps of a record."""
    info = header.info
    return IndexRow(
        info.key,
        group,
        header.offset,
        info.length,
        info.kind,
        info.retention,
        info.tokens,
        header.expires_at,
        info.tenant_tag,
    )


def stored_events(entries: Iterable[tuple[Header, str]]) -> Iterable[Stored]:
    """One event for each chain of blocks of one bucket, one for each snapshot; (header, bucket name) in order."""
    previous: Key | None = None
    chain = 0

    def chain_of(entry: tuple[Header, str]) -> tuple[int, str, int]:
        nonlocal previous, chain
        info = entry[0].info
        if info.kind is not EntryKind.BLOCK or info.parent != previous:
            chain += 1
        previous = info.key if info.kind is EntryKind.BLOCK else None
        return chain, entry[1], info.length

    for (_, bucket, length), run in groupby(entries, chain_of):
        infos = [header.info for header, _ in run]
        parent = infos[0].parent if infos[0].kind is EntryKind.BLOCK else None
        keys = tuple(info.key for info in infos)
        yield Stored(infos[0].kind, Tier.STORE, keys, parent, infos[-1].tokens, length, bucket)


class Committer:
    """Ends with the None that the writer sends last."""

    def __init__(
        self,
        groups: queue.Queue[Group | None],
        entries: WriteQueue,
        index: Index,
        table: SegmentTable,
        counters: Counters,
        events: EventSink,
        fail: Fail,
        covered: Callable[[Pending], bool],
        look: Callable[[str], None],
        own: OwnSegments,
        still_ours: Callable[[], bool],
        index_timeout_s: float,
    ) -> None:
        """`covered`: whether an erasure came after the entry was accepted. `look`: learn what other processes erased;
        OSError if that cannot be known. `still_ours`: nobody has taken this writer for dead and its segments over;
        OSError if that cannot be told."""
        self._groups = groups
        self._entries = entries
        self._index = index
        self._table = table
        self._counters = counters
        self._events = events
        self._fail = fail
        self._covered = covered
        self._look = look
        self._telling = threading.Lock()
        """Held from the last look at erasures until the index knows."""
        self.missing: set[str] = set()
        """Segments with durable records that the index was not told of."""
        self._still_ours = still_ours
        self._index_timeout_s = index_timeout_s
        self._sealer = Sealer(table, own, self._check_ours)
        self._thread = threading.Thread(target=self._run, name="store-commit", daemon=True)

    def start(self) -> None:
        self._sealer.start()
        self._thread.start()

    def join(self) -> None:
        self._thread.join()
        self._sealer.close()

    @property
    def settled(self) -> bool:
        """Everything that became durable is sealed and in the index."""
        return not self.missing and not self._sealer.unsealed

    def take_missing(self, still_open: frozenset[str]) -> tuple[str, ...]:
        """Sealed segments with records that the index was not told of; whoever takes one tells it."""
        with self._telling:
            paths = tuple(path for path in self.missing if path not in still_open)
            self.missing.difference_update(paths)
            return paths

    def barrier(self) -> None:
        """Returns when the index knows whatever was committed by a look at erasures before now."""
        with self._telling:
            return

    def _run(self) -> None:
        while (group := self._groups.get()) is not None:
            for segment, pendings in group.written().items():
                try:
                    self._commit(segment, pendings)
                except Exception:  # noqa: BLE001 - the boundary: one bad group must not end all writing (L13)
                    _log.exception("a group of %d records was given up", len(pendings))
                    self._fail([pending for pending in pendings if not pending.settled], "internal")
            for segment in group.retired:
                self._sealer.put(segment)

    def _commit(self, segment: OpenSegment, pendings: Sequence[Pending]) -> None:
        headers = [pending.header for pending in pendings if pending.header is not None]
        try:
            segment.sync(headers)
            # Asked behind the sync: who took over before this answer may have sealed the segment without these
            # records; who does so after it finds them.
            self._check_ours()
        except OSError as error:
            _log.error("%s cannot be made durable: %s", segment.path, error)
            self._fail(pendings, cause_of(error))
            return
        try:
            self._look(segment.path)
        except OSError as error:
            _log.error("the log of erasures cannot be read, so nothing may be told: %s", error)
            self._fail(pendings, cause_of(error))
            return
        with self._telling:
            kept = [pending for pending in pendings if not self._covered(pending)]
            told = self._tell(segment, kept)
        if len(kept) < len(pendings):
            known = set(map(id, kept))
            self._fail([pending for pending in pendings if id(pending) not in known], "dropped")
        if not told:
            self._fail(kept, "index")
            return
        self._counters.add(
            written_bytes=sum(pending.info.length for pending in kept),
            refreshed_bytes=sum(pending.info.length for pending in kept if pending.replaces is not None),
        )
        bucket = bucket_name(segment.path)
        for event in stored_events((pending.header, bucket) for pending in kept if pending.header is not None):
            self._events(event)
        settle(kept, True)
        self._entries.release(pending.info.key for pending in kept)

    def _tell(self, segment: OpenSegment, kept: Sequence[Pending]) -> bool:
        """Whether the index knows them now."""
        rows = [row_of(pending.header, pending.group) for pending in kept if pending.header is not None]
        try:
            self._index.put_many(rows, time.monotonic() + self._index_timeout_s)
        except IndexUnavailable as error:
            # The bytes are safe, but nobody can find them until they are told again: so they do not count as stored.
            _log.warning("%d durable records are not in the index: %s", len(rows), error)
            self.missing.add(segment.path)
            return False
        self._table.remove(pending.replaces for pending in kept if pending.replaces is not None)
        self._table.add(rows)
        return True

    def _check_ours(self) -> None:
        if not self._still_ours():
            raise OSError(errno.ESTALE, "this writer was taken for dead and its segments were taken over; restart it")
