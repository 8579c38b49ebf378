"""The parts of one segment store, put together: who knows whom, what starts and what stops when."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence

from headrace.kvcache.cache_events import CacheChange, EventSink
from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.index.base import Index, IndexRow, IndexUnavailable
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import (
    WallClock,
)
from headrace.kvcache.store.files import FileLayer
from headrace.kvcache.store.rebuild import Rebuilder
from headrace.kvcache.store.retention.classes import Lives
from headrace.kvcache.store.segments.adoption import Adoption
from headrace.kvcache.store.segments.buffers import BufferPool
from headrace.kvcache.store.segments.commit import Committer
from headrace.kvcache.store.segments.counters import Counters
from headrace.kvcache.store.segments.direct import direct_io_works
from headrace.kvcache.store.segments.erasing import Epochs, Erasing
from headrace.kvcache.store.segments.erasures import Erasures
from headrace.kvcache.store.segments.handles import SegmentFiles
from headrace.kvcache.store.segments.intake import Intake
from headrace.kvcache.store.segments.names import LOCKS
from headrace.kvcache.store.segments.own_segments import OwnSegments
from headrace.kvcache.store.segments.pending import Pending, WriteQueue, settle
from headrace.kvcache.store.segments.quotas import Quotas
from headrace.kvcache.store.segments.reader import SegmentReader
from headrace.kvcache.store.segments.reads import Reads
from headrace.kvcache.store.segments.records import Records
from headrace.kvcache.store.segments.recovery import find_segments
from headrace.kvcache.store.segments.relief import PressureRelief
from headrace.kvcache.store.segments.rewriter import Rewriter
from headrace.kvcache.store.segments.settings import Liveness, SegmentSettings
from headrace.kvcache.store.segments.sweeper import Sweeper
from headrace.kvcache.store.segments.table import SegmentTable
from headrace.kvcache.store.segments.unlinking import Unlinking
from headrace.kvcache.store.segments.uses import Uses
from headrace.kvcache.store.segments.writer import SegmentWriter
from headrace.kvcache.store.segments.writers import become

_log = logging.getLogger(__name__)
_SCAN_S = 60.0
_BATCH_BYTES = 16 << 20
_REBUILD_S = 5.0
"""How long an opening waits for a lost index; afterwards what is not refilled yet is a miss."""


class Parts:
    """Everything that SegmentStore (engine.py) is made of."""

    def __init__(
        self,
        files: FileLayer,
        index: Index,
        settings: SegmentSettings,
        lives: Lives,
        events: EventSink,
        wall: WallClock,
        liveness: Liveness | None,
    ) -> None:
        """See SegmentStore. Nothing runs before `start`."""
        events = _guarded(events)
        self.settings = settings
        self.files = files
        self.index = index
        self.wall = wall
        self.lock = become(files, settings.writer)
        try:
            self.direct = direct_io_works(files, f"{LOCKS}/{settings.writer}.probe")
        except OSError:
            self.lock.release(settled=True)
            raise
        if not self.direct:
            _log.warning("the file system of the store has no O_DIRECT: going through the page cache")
        timeout = settings.index_timeout_s
        patient = settings.index_patience_s
        self.table = SegmentTable()
        self.counters = Counters()
        self.uses = Uses(files, settings.writer, wall)
        self.epochs = Epochs()
        self.erasures = Erasures(files, settings.erasure_poll_s, self._learned)
        self.records = Records(files, self.erasures, wall, direct=self.direct)
        self.own = OwnSegments()
        self.entries = WriteQueue()
        self.quotas = Quotas(
            files,
            self.table,
            self.entries,
            self.own,
            settings.segment_bytes,
            settings.capacity_bytes,
            settings.tenant_bytes,
        )
        self.handles = SegmentFiles(files, settings.open_files, direct=self.direct)
        self.read_buffers = BufferPool(settings.read_buffer_bytes)
        self.reader = SegmentReader(
            self.handles,
            self.read_buffers,
            settings.read_threads,
            settings.read_bytes,
            settings.busy_wait_s,
        )
        self.staging = BufferPool(settings.queue_bytes)
        self.intake = Intake(
            self.entries,
            self.staging,
            index,
            self.counters,
            lives,
            wall,
            lambda: self.epochs.now,
            self._learn,
            self.quotas.room,
            self.row_covered,
            self._known_again,
            timeout,
        )
        self.writer = SegmentWriter(
            files,
            settings,
            self.entries,
            self.staging,
            self._fail,
            self.epochs.covers,
            self._look,
            self.own,
            self.quotas.open_segment,
            direct=self.direct,
        )
        self.committer = Committer(
            self.writer.groups,
            self.entries,
            index,
            self.table,
            self.counters,
            events,
            self._fail,
            self._pending_covered,
            self._look_at_once,
            self.writer.retire,
            self.own,
            lambda: self.lock.held,
            patient,
        )
        self.rebuilder = Rebuilder(index, self.records.rows, owner=settings.writer, wall=wall, settle=self.load_table)
        self.reads = Reads(
            index,
            self.reader,
            self.erasures,
            self.table,
            self.counters,
            events,
            wall,
            timeout,
            self.rebuilder.notice,
            names_lag=files.names_lag,
        )
        self.rewriter = Rewriter(
            self.intake,
            index,
            self.reads.read,
            self.uses.used,
            lives,
            wall,
            lambda: self.epochs.now,
            self.row_covered,
            patient,
            min(_BATCH_BYTES, settings.read_buffer_bytes // 4),
        )
        self.unlinking = Unlinking(files, index, self.handles, self.table, patient)
        self.adoption = Adoption(
            files,
            index,
            self.table,
            events,
            wall,
            settings.writer,
            liveness,
            self.erasures,
            patient,
            direct=self.direct,
        )
        passing = threading.Lock()
        self.erasing = Erasing(
            files,
            index,
            self.unlinking,
            self.erasures,
            self.epochs,
            self.writer,
            self.own,
            settings.writer,
            self.committer.barrier,
            self.reads.removed,
            events,
            passing,
        )
        self.relief = PressureRelief(
            self.quotas,
            index,
            self.table,
            self.rewriter,
            self.unlinking,
            self.uses,
            self.counters,
            self.reads.removed,
            lives,
            wall,
            lambda: self.epochs.now,
            patient,
        )
        self.sweeper = Sweeper(
            files,
            index,
            self.unlinking,
            self.adoption,
            self.erasures,
            self.counters,
            events,
            wall,
            self.relief.relieve,
            self.load_table,
            self._tick,
            self.quotas.pressing,
            self.quotas.tenants_press,
            passing,
            tick_s=settings.tick_s,
            sweep_s=settings.sweep_s,
            index_timeout_s=patient,
        )

    def start(self) -> None:
        """A small store refills its lost index before the first answer, if nobody else does; a large one meanwhile."""
        self.rebuilder.start()
        self.rebuilder.wait_first_look(_REBUILD_S)
        try:
            self.load_table()
        except IndexUnavailable as error:
            _log.warning("the index does not answer yet: %s", error)
        self.writer.start()
        self.committer.start()
        self.rewriter.start()
        self.sweeper.start()

    def close(self) -> None:
        """What was accepted becomes durable; then everything stops."""
        self.sweeper.close()
        self.rebuilder.close()
        self.rewriter.close()
        self.entries.close()
        self.writer.join()
        self.committer.join()
        self.reader.close()
        self.handles.close()
        self.erasures.close()
        self.index.close()
        self.lock.release(settled=self.committer.settled)
        self.files.close()

    def load_table(self) -> None:
        """Look at the whole index again. IndexUnavailable, OSError."""
        self.table.replace(self.index.scan(time.monotonic() + _SCAN_S))
        for found in find_segments(self.files):
            if found.sidecar:
                self.table.sealed(found.name.path)

    def _known_again(self, keys: Sequence[Key], retention: RetentionClass) -> None:
        self.rewriter.touch(keys, retention, hit=False)

    def _tick(self) -> None:
        self.uses.tick()
        for path in self.own.paths():
            self._look(path)
        for path in self.committer.untold(self.own.paths()):
            try:
                _log.info("%d records of %s are in the index now", self.adoption.reindex(path), path)
            except (OSError, IndexUnavailable) as error:
                # The next tick tries again; what else there is to do waits for neither (L9).
                _log.info("records of %s are not in the index yet: %s", path, error)
            else:
                self.committer.told(path)

    def _look(self, path: str) -> None:
        """Learn what other processes erased. A segment of ours that an erasure covers takes nothing more: what came
        after the erasure would look erased."""
        self.erasures.refresh({path})
        self._retire_covered(path)

    def _look_at_once(self, path: str) -> None:
        """The same, however short ago the last look was: the index is told next."""
        self.erasures.refresh({path}, at_once=True)
        self._retire_covered(path)

    def _retire_covered(self, path: str) -> None:
        if self.erasures.covers_any(path):
            self.writer.retire(path)

    def _learn(self, namespaces: Collection[bytes]) -> None:
        try:
            self.erasures.learn(namespaces, time.monotonic() + self.settings.index_timeout_s)
        except OSError as error:
            _log.info("what is accepted now is dropped if anything was erased lately: %s", error)

    def _learned(self, namespace: bytes, tenant_tag: bytes | None) -> None:
        """Of an erasure, whoever made it: what was accepted before may have been read or computed before it."""
        if tenant_tag is None:
            self.epochs.advance(namespace=namespace)
        else:
            self.epochs.advance(tenant_tag=tenant_tag)

    def _pending_covered(self, pending: Pending) -> bool:
        return self.epochs.covers(pending) or self.erasures.covers(pending.group, pending.info.tenant_tag)

    def row_covered(self, row: IndexRow) -> bool:
        return self.erasures.covers(row.group, row.tenant_tag)

    def _fail(self, pendings: Sequence[Pending], cause: str) -> None:
        self.counters.failed(cause, len(pendings))
        settle(pendings, False)
        self.entries.release(pending.info.key for pending in pendings)


def _guarded(events: EventSink) -> EventSink:
    """A listener that raises must not end the thread that tells it."""

    def tell(change: CacheChange) -> None:
        try:
            events(change)
        except Exception:  # noqa: BLE001 - the boundary to whoever listens
            _log.exception("a listener failed at %s", type(change).__name__)

    return tell
