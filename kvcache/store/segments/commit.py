"""The commit threads: one syncs groups, one tells the index, then everybody (accepted becomes durable).

Beside a busy disk either takes 10 to 30 ms, most of it waiting for a sync (measured): while the index is told of one
group the next one is synced, and whatever was synced meanwhile the index is told in one transaction.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from headrace.kvcache.cache_events import EventSink, Stored, Tier
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.index.base import Index, IndexRow, IndexUnavailable
from headrace.kvcache.keys import Key
from headrace.kvcache.store.rebuild import outlives
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
_WAITING = 4
"""Groups that the index is not told of yet; more make the syncing thread wait (L12)."""


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


@dataclass(frozen=True, slots=True)
class _Synced:
    """What is on the disk and not yet in the index."""

    written: Mapping[OpenSegment, Sequence[Pending]]
    retired: Sequence[OpenSegment]


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
        retire: Callable[[str], None],
        own: OwnSegments,
        still_ours: Callable[[], bool],
        index_timeout_s: float,
    ) -> None:
        """`covered`: whether an erasure came after the entry was accepted. `look`: learn what other processes erased;
        OSError if that cannot be known. `retire`: nothing more goes into a segment. `still_ours`: nobody has taken this
        writer for dead and its segments over; OSError if that cannot be told."""
        self._groups = groups
        self._entries = entries
        self._index = index
        self._table = table
        self._counters = counters
        self._events = events
        self._fail = fail
        self._covered = covered
        self._look = look
        self._retire = retire
        self._telling = threading.Lock()
        """Held from the last look at erasures until the index knows."""
        self.missing: set[str] = set()
        """Segments with durable records that the index was not told of."""
        self._still_ours = still_ours
        self._index_timeout_s = index_timeout_s
        self._sealer = Sealer(table, own, self._check_ours)
        self._synced: queue.Queue[_Synced | None] = queue.Queue(maxsize=_WAITING)
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._sync_groups, "store-sync"), (self._tell_groups, "store-commit"))
        ]

    def start(self) -> None:
        self._sealer.start()
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._sealer.close()

    @property
    def settled(self) -> bool:
        """Everything that became durable is sealed and in the index."""
        return not self.missing and not self._sealer.unsealed

    def untold(self, still_open: frozenset[str]) -> tuple[str, ...]:
        """Segments that take no more, with records that the index was not told of; who tells it of one calls `told`."""
        with self._telling:
            return tuple(path for path in self.missing if path not in still_open)

    def told(self, path: str) -> None:
        """The index knows all of that segment."""
        with self._telling:
            self.missing.discard(path)

    def barrier(self) -> None:
        """Returns when the index knows whatever was committed by a look at erasures before now."""
        with self._telling:
            return

    def _sync_groups(self) -> None:
        while (group := self._groups.get()) is not None:
            written = {
                segment: pendings for segment, pendings in group.written().items() if self._sync(segment, pendings)
            }
            self._synced.put(_Synced(written, group.retired))
        self._synced.put(None)

    def _sync(self, segment: OpenSegment, pendings: Sequence[Pending]) -> bool:
        """Whether they are on the disk for good."""
        try:
            segment.sync([pending.header for pending in pendings if pending.header is not None])
        except OSError as error:
            _log.error("%s cannot be made durable: %s", segment.path, error)
            self._fail(pendings, cause_of(error))
        except Exception:  # noqa: BLE001 - the boundary: one bad group must not end all writing (L13)
            _log.exception("a group of %d records was given up", len(pendings))
            self._fail(pendings, "internal")
        else:
            return True
        return False

    def _tell_groups(self) -> None:
        ended = False
        while not ended:
            got = [self._synced.get()]
            while not self._synced.empty():  # nobody else takes from it
                got.append(self._synced.get())
            groups = [group for group in got if group is not None]
            ended = len(groups) < len(got)
            if groups:
                self._tell_of(groups)

    def _tell_of(self, groups: Sequence[_Synced]) -> None:
        written = [(segment, pendings) for group in groups for segment, pendings in group.written.items()]
        try:
            self._commit(written)
        except Exception:  # noqa: BLE001 - the boundary: one bad group must not end all writing (L13)
            left = [pending for _, pendings in written for pending in pendings if not pending.settled]
            _log.exception("a group of %d records was given up", len(left))
            self._fail(left, "internal")
        for group in groups:
            for segment in group.retired:
                self._sealer.put(segment)

    def _commit(self, written: Iterable[tuple[OpenSegment, Sequence[Pending]]]) -> None:
        ours: list[tuple[OpenSegment, Sequence[Pending]]] = []
        for segment, pendings in written:
            try:
                # Asked behind the sync: who took over before this answer may have sealed the segment without these
                # records; who does so after it finds them.
                self._check_ours()
                self._look(segment.path)
            except OSError as error:
                _log.error("%d records of %s may not be told of: %s", len(pendings), segment.path, error)
                self._fail(pendings, cause_of(error))
            else:
                ours.append((segment, pendings))
        with self._telling:
            kept: list[tuple[OpenSegment, Sequence[Pending]]] = [
                (segment, [one for one in pendings if not self._covered(one)]) for segment, pendings in ours
            ]
            try:
                current = [(segment, self._current(known)) for segment, known in kept]
                self._tell(current)
                told = True
            except IndexUnavailable as error:
                # The bytes are safe, but nobody can find them until they are told again: so they do not count as
                # stored. Their segments end here, so that this is soon (`untold`).
                current, told = kept, False
                paths = {segment.path for segment, known in kept if known}
                _log.warning("durable records of %d segments are not in the index: %s", len(paths), error)
                self.missing |= paths
        for (_, pendings), (_, known), (segment, new) in zip(ours, kept, current, strict=True):
            self._fail(_without(pendings, known), "dropped")
            self._fail(_without(known, new), "outlived")
            if told:
                self._announce(segment, new)
            else:
                self._fail(new, "index")
                self._retire(segment.path)

    def _current(self, pendings: Sequence[Pending]) -> Sequence[Pending]:
        """Without copies of records that have got a longer life since they were read: a pin, say."""
        copies = [pending for pending in pendings if pending.replaces is not None and pending.header is not None]
        if not copies:
            return pendings
        held = self._index.held([copy.info.key for copy in copies], time.monotonic() + self._index_timeout_s)
        late = [
            copy
            for copy, row in zip(copies, held, strict=True)
            if row is not None and copy.header is not None and outlives(row, row_of(copy.header, copy.group))
        ]
        return _without(pendings, late) if late else pendings

    def _announce(self, segment: OpenSegment, known: Sequence[Pending]) -> None:
        """They are durable and in the index."""
        self._counters.add(
            written_bytes=sum(pending.info.length for pending in known),
            refreshed_bytes=sum(pending.info.length for pending in known if pending.replaces is not None),
        )
        bucket = bucket_name(segment.path)
        for event in stored_events((pending.header, bucket) for pending in known if pending.header is not None):
            self._events(event)
        settle(known, True)
        self._entries.release(pending.info.key for pending in known)

    def _tell(self, kept: Sequence[tuple[OpenSegment, Sequence[Pending]]]) -> None:
        """Index and table. IndexUnavailable."""
        pendings = [pending for _, known in kept for pending in known]
        rows = [row_of(pending.header, pending.group) for pending in pendings if pending.header is not None]
        if not rows:
            return
        self._index.put_many(rows, time.monotonic() + self._index_timeout_s)
        self._table.remove(pending.replaces for pending in pendings if pending.replaces is not None)
        self._table.add(rows)

    def _check_ours(self) -> None:
        if not self._still_ours():
            raise OSError(errno.ESTALE, "this writer was taken for dead and its segments were taken over; restart it")


def _without(pendings: Sequence[Pending], others: Sequence[Pending]) -> list[Pending]:
    of_others = set(map(id, others))
    return [pending for pending in pendings if id(pending) not in of_others]
