"""A store of segments in memory, without payloads, that runs the policy objects of kvcache/store/retention.

It appends, re-appends and unlinks as the segment engine does; every byte written is checked against the quota.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from bench.retention_harness.trace import BLOCK_TOKENS
from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.store.retention.classes import DEFAULT, Lives, expired
from headrace.kvcache.store.retention.heat import Heat
from headrace.kvcache.store.retention.ledger import Ledger, Placed, SegmentUse
from headrace.kvcache.store.retention.pressure import Plan, Pressure, Quota, moved_bucket, segment_bytes
from headrace.kvcache.store.retention.refresh import Refresher, UsedEntry

RECORD_BYTES = 118_784 * (BLOCK_TOKENS // 128)
"""One block of the trace: four records of 114,048 B with their headers, padded to 4 KiB."""
TENANT = bytes(16)
WRITING = 8
"""Segments open for writing at once; the least recently written is sealed for another."""
Stream = tuple[RetentionClass, int, bool]
"""What is written to one segment: class, bucket end, re-appended or new."""


class QuotaBroken(AssertionError):
    """The disk held more than its quota."""


@dataclass(slots=True)
class Segment:
    name: str
    retention: RetentionClass
    end: int
    keys: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entry:
    segment: Segment
    tokens: int
    parent: bytes | None


@dataclass
class Counts:
    """Blocks, since the start."""

    written: int = 0
    refreshed: int = 0
    rewritten: int = 0
    """Re-appended to free their segment."""
    expired: int = 0
    evicted: int = 0
    evictions: int = 0
    """Passes of pressure eviction."""
    refused: int = 0
    """Not stored since the disk was full."""
    peak_bytes: int = 0
    stranded_peak: float = 0.0
    """Largest share of blocks above the horizon whose parent was gone, over all evictions."""

    @property
    def write_amplification(self) -> float:
        return (self.written + self.refreshed + self.rewritten) / max(self.written, 1)


class SegmentModel:
    """Single-threaded; `now` must not run backwards. Keys are any distinct bytes."""

    def __init__(self, quota_bytes: int, *, lives: Lives = DEFAULT, refresh: bool = True, rewrite: float = 0.3) -> None:
        self.quota = Quota(quota_bytes, rewrite=rewrite)
        self.counts = Counts()
        self._lives = lives
        self._refresh = refresh
        self._segment_bytes = segment_bytes(quota_bytes)
        self._ledger = Ledger()
        self._heat = Heat()
        self._pressure = Pressure(self.quota)
        self._refresher = Refresher(lives)
        self._entries: dict[bytes, Entry] = {}
        self._segments: dict[str, Segment] = {}
        self._writing: OrderedDict[Stream, Segment] = OrderedDict()
        self._opened = 0
        self._now = 0.0
        self._bucket_ends: dict[int, int] = {}
        """Segments by bucket end."""

    @property
    def blocks(self) -> int:
        return len(self._entries)

    @property
    def quota_share(self) -> float:
        """Share of the quota on disk now."""
        return self._ledger.disk_bytes / self.quota.disk_bytes

    def bucket_ends(self) -> Sequence[int]:
        return sorted(self._bucket_ends)

    def lead(self, keys: Sequence[bytes], now: float) -> int:
        """How many leading blocks are there, unexpired."""
        entries = self._entries
        for at, key in enumerate(keys):
            entry = entries.get(key)
            if entry is None or expired(entry.segment.end, now):
                return at
        return len(keys)

    def request(self, keys: Sequence[bytes], retention: RetentionClass, now: float) -> int:
        """One request: its leading blocks are used, the others computed and stored. Returns the leading blocks."""
        self._now = now
        lead = self.lead(keys, now)
        self._use(keys[:lead], retention, now, hit=True)
        known = [key for key in keys[lead:] if key in self._entries]
        self._use(known, retention, now, hit=False)
        for at in range(lead, len(keys)):
            if keys[at] in self._entries:
                continue
            if not self._quota_admits():
                self.counts.refused += len(keys) - at  # a suffix without its prefix is of no use
                break
            stream = (retention, self._lives.bucket(retention, now), False)
            segment = self._append(keys[at], (at + 1) * BLOCK_TOKENS, keys[at - 1] if at else None, stream)
            self._ledger.append(segment.name, TENANT, RECORD_BYTES, now)
            self._wrote()
            self._pressure.written(RECORD_BYTES)
            self.counts.written += 1
            self.press()
        return lead

    def sweep(self, now: float) -> None:
        """Unlink what has expired."""
        gone = {end for end in self._bucket_ends if expired(end, now)}
        if not gone:
            return
        for segment in [segment for segment in self._segments.values() if segment.end in gone]:
            self.counts.expired += self._unlink(segment)

    def press(self) -> None:
        """Pressure eviction, when the disk is full enough."""
        if self._ledger.disk_bytes <= self.quota.high * self.quota.disk_bytes:
            return
        plan = self._pressure.plan(self._ledger, self._heat, self._places)
        if plan is None:
            return
        for name in plan.unlink:
            self._evict(self._segments[name], plan)
        self.counts.evictions += 1
        self.counts.stranded_peak = max(self.counts.stranded_peak, self._stranded())

    def problems(self) -> Sequence[str]:
        return list(self._ledger.problems())

    def _places(self, keys: Collection[bytes]) -> Iterator[Placed]:
        for key in keys:
            yield Placed(key, self._entries[key].segment.name, TENANT, RECORD_BYTES)

    def _use(self, keys: Sequence[bytes], retention: RetentionClass, now: float, *, hit: bool) -> None:
        entries = self._entries
        self._heat.touch([(key, entries[key].tokens) for key in keys], now, hit=hit)
        if not self._refresh:
            return
        used = [UsedEntry(key, (s := entries[key].segment).retention, s.end) for key in keys]
        batch = self._refresher.plan(used, retention, now)
        for refresh in batch:
            if not self._quota_admits():
                break
            self._move(refresh.key, refresh.retention, self._lives.bucket(refresh.retention, now))
            self.counts.refreshed += 1
        self._refresher.done(batch)

    def _quota_admits(self) -> bool:
        return self.quota.admits(self._ledger, TENANT, RECORD_BYTES)

    def _move(self, key: bytes, retention: RetentionClass, end: int) -> None:
        entry = self._entries[key]
        target = self._append(key, entry.tokens, entry.parent, (retention, end, True))
        self._heat.hold(key, self._ledger.segments[entry.segment.name].written)
        self._ledger.move(TENANT, RECORD_BYTES, entry.segment.name, target.name)
        self._wrote()

    def _append(self, key: bytes, tokens: int, parent: bytes | None, stream: Stream) -> Segment:
        """The segment that now holds the entry. What was used and what is new are kept apart: they die apart."""
        segment = self._writing.get(stream)
        if segment is not None and (len(segment.keys) + 1) * RECORD_BYTES > self._segment_bytes:
            self._seal(stream)
            segment = None
        if segment is None:
            while len(self._writing) >= WRITING:
                self._seal(next(iter(self._writing)))
            self._opened += 1
            retention, end, _ = stream
            segment = Segment(f"{retention.name.lower()}/{end}/{self._opened}", retention, end)
            self._writing[stream] = segment
            self._segments[segment.name] = segment
            self._bucket_ends[end] = self._bucket_ends.get(end, 0) + 1
            self._ledger.add(SegmentUse(segment.name))
        self._writing.move_to_end(stream)
        segment.keys.append(key)
        self._entries[key] = Entry(segment, tokens, parent)
        return segment

    def _seal(self, stream: Stream) -> None:
        self._ledger.seal(self._writing.pop(stream).name)

    def _stranded(self) -> float:
        """Share of the blocks at or above the horizon whose parent is gone."""
        horizon, above, stranded = self._heat.horizon, 0, 0
        for key, entry in self._entries.items():
            if self._heat.rank(key, self._ledger.segments[entry.segment.name].written) >= horizon:
                above += 1
                stranded += entry.parent is not None and entry.parent not in self._entries
        return stranded / max(above, 1)

    def _evict(self, segment: Segment, plan: Plan) -> None:
        written = self._ledger.segments[segment.name].written
        for key in segment.keys:
            entry = self._entries.get(key)
            if entry is not None and entry.segment is segment and plan.keeps(TENANT, self._heat.rank(key, written)):
                last_use = self._heat.last_use(key, written)
                end = moved_bucket(self._lives, segment.retention, segment.end, last_use, self._now)
                self._move(key, segment.retention, end)
                self._pressure.rewritten(RECORD_BYTES)
                self.counts.rewritten += 1
        self.counts.evicted += self._unlink(segment)

    def _unlink(self, segment: Segment) -> int:
        lost = 0
        for key in segment.keys:
            entry = self._entries.get(key)
            if entry is not None and entry.segment is segment:
                del self._entries[key]
                self._heat.forget((key,))
                lost += 1
        self._ledger.unlink(segment.name)
        del self._segments[segment.name]
        for stream in [stream for stream, writing in self._writing.items() if writing is segment]:
            del self._writing[stream]
        self._bucket_ends[segment.end] -= 1
        if not self._bucket_ends[segment.end]:
            del self._bucket_ends[segment.end]
        return lost

    def _wrote(self) -> None:
        disk = self._ledger.disk_bytes
        self.counts.peak_bytes = max(self.counts.peak_bytes, disk)
        if disk > self.quota.disk_bytes:
            raise QuotaBroken(f"{disk} bytes on a disk of {self.quota.disk_bytes}")
