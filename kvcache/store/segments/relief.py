"""Pressure eviction on real segments: what retention/pressure.py plans, carried out (spec/kv_tier.md, Retention).

Runs in the elected sweeper. A segment that goes is emptied first: what the plan keeps is appended again and durable
before the segment is out of sight, so that a reader finds the one copy or the other.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.index.base import Index, IndexRow
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import DropCount, WallClock
from headrace.kvcache.store.retention.classes import NEVER, Lives
from headrace.kvcache.store.retention.heat import tick
from headrace.kvcache.store.retention.ledger import Ledger, Placed, SegmentUse
from headrace.kvcache.store.retention.pressure import Plan, Pressure, moved_bucket
from headrace.kvcache.store.segments.counters import Counters
from headrace.kvcache.store.segments.disk_use import DiskUse
from headrace.kvcache.store.segments.intake import Again
from headrace.kvcache.store.segments.quotas import Quotas
from headrace.kvcache.store.segments.record import record_bytes
from headrace.kvcache.store.segments.rewriter import Rewriter
from headrace.kvcache.store.segments.sweeper import Relief
from headrace.kvcache.store.segments.table import SegmentTable, take_out
from headrace.kvcache.store.segments.unlinking import Unlinking
from headrace.kvcache.store.segments.uses import Uses

_log = logging.getLogger(__name__)
_BATCH = 4096
_DURABLE_S = 60.0
"""How long re-appended entries may take to become durable; later the segment stays for another pass."""


class PressureRelief:
    """For the sweeper's thread."""

    def __init__(
        self,
        quotas: Quotas,
        index: Index,
        table: SegmentTable,
        rewriter: Rewriter,
        unlinking: Unlinking,
        uses: Uses,
        counters: Counters,
        removed: Callable[[Sequence[IndexRow]], DropCount],
        lives: Lives,
        wall: WallClock,
        epoch: Callable[[], int],
        index_timeout_s: float,
    ) -> None:
        """`removed`: tell everybody that the index has these rows no more."""
        self._quotas = quotas
        self._index = index
        self._table = table
        self._rewriter = rewriter
        self._unlinking = unlinking
        self._uses = uses
        self._counters = counters
        self._removed = removed
        self._lives = lives
        self._wall = wall
        self._epoch = epoch
        self._index_timeout_s = index_timeout_s
        self._pressure = Pressure(quotas.quota)
        self._written: dict[str, int] = {}
        """Tick at which each segment was last seen growing."""
        self._held = -1
        """Bytes after the last pass; negative before the first."""

    def relieve(self) -> Relief:
        """One pass: nothing below the marks. OSError or IndexUnavailable breaks it off; what was done stays done."""
        self._uses.gather()
        use = self._quotas.measure()
        self._look(use)
        if self._held >= 0:
            self._pressure.written(max(use.nbytes - self._held, 0))
        self._pressure.quota = self._quotas.quota
        ledger = self._ledger(use)
        plan = self._uses.plan(self._pressure, ledger, self._places)
        freed = segments = pruned = 0
        if plan is not None:
            pruned = self._prune(plan)
            for name in plan.unlink:
                if self._empty(name, plan):
                    segments += 1
                    freed += ledger.segments[name].disk_bytes
                    # At once: what the next one re-appends may need the room.
                    self._unlinking.reap()
            if plan.unlink and not segments and self._quotas.full:
                # Nowhere is room for anything: the least of it goes, or nothing would ever be written again.
                name = plan.unlink[0]
                _log.warning("%s goes with what was to outlive it: there is no room to append that again", name)
                self._drop(name)
                segments, freed = 1, ledger.segments[name].disk_bytes
                self._unlinking.reap()
            use = self._quotas.measure()
        if plan is None or not (freed or pruned):
            # What presses is pinned, or waits for its last readers.
            self._quotas.relieved()
        self._held = use.nbytes
        return Relief(segments, freed)

    def _look(self, use: DiskUse) -> None:
        """When each segment was last appended to: now, if it is being written; for one that was sealed before this
        process looked, when its bucket was the one to write to."""
        now = self._wall()
        written = {}
        for segment in use.segments:
            path, bucket = segment.name.path, segment.name.bucket
            if segment.sealed and path in self._written:
                written[path] = self._written[path]
            elif segment.sealed and bucket.end != NEVER:
                written[path] = tick(min(bucket.end - self._lives.of[bucket.retention].life_s, now))
            else:
                written[path] = tick(now)
        self._written = written

    def _ledger(self, use: DiskUse) -> Ledger:
        live = {view.path: view.tenant_bytes for view in self._table.views()}
        ledger = Ledger()
        for segment in use.segments:
            path = segment.name.path
            ledger.add(
                SegmentUse(
                    path,
                    pinned=segment.name.bucket.retention is RetentionClass.PINNED,
                    open=not segment.sealed,
                    disk_bytes=segment.nbytes,
                    written=self._written[path],
                    live=Counter(live.get(path, {})),
                )
            )
        return ledger

    def _places(self, keys: Collection[Key]) -> Iterator[Placed]:
        wanted = list(keys)
        for start in range(0, len(wanted), _BATCH):
            batch = wanted[start : start + _BATCH]
            for row in self._index.get_many(batch, self._deadline()):
                if row is not None:
                    yield Placed(row.key, row.group, row.tenant_tag, record_bytes(row.length))

    def _prune(self, plan: Plan) -> int:
        """Tenants over their quota lose their lowest entries, wherever they lie; how many."""
        pruned = 0
        for path in plan.prune:
            rows = [
                row
                for row in self._index.rows_of(path, self._deadline())
                if self._rank(row) < plan.tenant_horizons.get(row.tenant_tag, 0)
            ]
            lost = take_out(self._index, self._table, rows, self._deadline())
            self._lost(lost)
            pruned += len(lost)
        return pruned

    def _empty(self, path: str, plan: Plan) -> bool:
        """Append again what is kept, then let the segment go. False if it has to wait for another pass, since something
        that could be read was not stored again; what cannot be read goes with its segment."""
        epoch = self._epoch()
        rows = self._index.rows_of(path, self._deadline())
        kept = [row for row in rows if plan.keeps(row.tenant_tag, self._rank(row))]
        written = self._written[path]
        now = self._wall()
        last_use = self._uses.hold(kept, written)
        again = [
            Again(
                row,
                row.retention,
                moved_bucket(self._lives, row.retention, row.expires_at, last_use[row.key], now),
            )
            for row in kept
        ]
        # Entries of one bucket are written one behind the other: each change of bucket costs a segment.
        again.sort(key=lambda each: (each.end or 0, each.row.place))
        stored = True
        try:
            for ticket in self._rewriter.rewrite(again, epoch):
                stored &= all(ticket.durable.result(timeout=_DURABLE_S))
        except FutureTimeoutError:
            _log.warning("%s is kept for now: what is to outlive it was not durable in %.0f s", path, _DURABLE_S)
            return False
        left: set[Key] = set()
        if not stored:
            # Not stored by us may be stored by a refresh, or erased: of those nothing is here any more.
            left = {row.key for row in self._index.rows_of(path, self._deadline())} & {row.key for row in kept}
        self._pressure.rewritten(sum(record_bytes(row.length) for row in kept if row.key not in left))
        if left:
            _log.warning("%s is kept for now: %d entries that are to outlive it were not stored again", path, len(left))
            return False
        self._drop(path)
        return True

    def _drop(self, path: str) -> None:
        self._lost(self._unlinking.drop(path))

    def _lost(self, rows: Sequence[IndexRow]) -> None:
        if rows:
            self._uses.forget(rows)
            self._counters.add(evicted_entries=len(rows))
            self._removed(rows)

    def _rank(self, row: IndexRow) -> int:
        return self._uses.rank(row.key, self._written.get(row.group, 0))

    def _deadline(self) -> float:
        return time.monotonic() + self._index_timeout_s
