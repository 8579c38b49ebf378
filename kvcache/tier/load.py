"""One load: which prefix, from where, and into the pool, prefix first, with a rolling window and one deadline.

What is not there at the deadline is computed instead: then the best snapshot of what has come is fetched in the time
that was kept for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from headrace.kvcache.entries import EntryInfo, EntryKind, GetResult, Loaded
from headrace.kvcache.keys import Key
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.tier.plan import FetchPlan, Wanted, plan_fetch, snapshot_keys
from headrace.kvcache.tier.sources import Expected, Source, release_results

SNAPSHOT_SHARE = 0.25
"""Of the time for a load, kept for a snapshot of what came when the rest did not (layouts that have them)."""
OWN_HOST = "host"
"""TierSource.name of this worker's host tier."""
LEAST_MEASURED_BYTES = 1 << 20
"""Smaller reads tell a source's latency, not its bandwidth."""


@dataclass(frozen=True)
class LoadSettings:
    """How hard a load tries. Seconds and bytes."""

    deadline_s: float = 0.5
    """For lookups and the first bytes of a load."""
    least_bytes_per_second: float = 200e6
    """A load may take this much longer per byte that it plans."""
    least_tokens: int = 256
    """Smaller gains are computed."""
    break_even: bool = True
    """Fetch only what is quicker to fetch than to compute, as measured."""
    read_bytes: int = 4 << 20
    """Of one get_many."""
    window: int = 4
    """Reads in flight per load, and reads whose bytes wait for the pool."""
    threads: int = 8
    """Per source, for all loads."""


class PoolSide(Protocol):
    """Where a load's entries go: the engine, between two steps."""

    def adopt(self, entries: Sequence[tuple[Key, EntryKind, memoryview]]) -> Future[int]:
        """Copy entries in, prefix first; answers how many leading ones are there. An exception: the load is over."""
        ...


@dataclass(frozen=True)
class LoadOutcome:
    """What a load brought."""

    reason: str
    """`loaded`, `short` (less than planned), `absent`, `not_worth` (break-even, too few tokens), `late` (nothing came
    in time), `over` (the request ended)."""
    tokens: int
    """Prefix usable afterwards, as far as the loader knows."""
    blocks_by_source: Mapping[str, int] = field(default_factory=dict)
    snapshots: int = 0
    nbytes_by_source: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Payload that the pool took."""
        return sum(self.nbytes_by_source.values())


@dataclass(frozen=True)
class _Fetched:
    """A verified entry and where it came from."""

    entry: Expected
    source: Source
    loaded: Loaded


@dataclass(frozen=True)
class _Reading:
    """One get_many under way."""

    source: Source
    keys: tuple[Key, ...]
    future: Future[Sequence[GetResult]]


class Load:
    """Read `run` first."""

    def __init__(
        self,
        wanted: Wanted,
        layout: KVLayout,
        settings: LoadSettings,
        sources: Sequence[Source],
        pool: PoolSide,
        worth: Callable[[FetchPlan, int, Mapping[Source, int]], bool],
        keep: Callable[[EntryInfo, memoryview], object] | None,
        clock: Callable[[], float],
        asked_at: float,
        not_after: float,
    ) -> None:
        """sources: those that are not dead, in order. worth: whether a plan that brings so many bytes from each source
        pays. keep: called with what came from elsewhere than the own host tier."""
        self._wanted = wanted
        self._layout = layout
        self._settings = settings
        self._sources = sources
        self._pool = pool
        self._worth = worth
        self._keep = keep
        self._clock = clock
        self._not_after = not_after
        self._deadline = min(not_after, asked_at + settings.deadline_s)
        self._rank: dict[Key, int] = {}
        """First of `sources` that says it has the key."""
        self._there = list(wanted.present)
        """Blocks in the pool."""
        self._adopting: deque[tuple[Future[int], list[_Fetched]]] = deque()
        self._full = self._over = False
        """The pool takes no more rows; the request has ended."""
        self._blocks: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._snapshots = 0

    def run(self) -> LoadOutcome:
        wanted, layout = self._wanted, self._layout
        usable = wanted.usable_tokens
        if usable == len(wanted.keys) * layout.block_tokens:
            return self._outcome("absent", usable)
        marks = snapshot_keys(wanted.keys, layout) if layout.has_snapshots else ()
        absent = [key for key, present in zip(wanted.keys, wanted.present, strict=True) if not present]
        self._look_up([*absent, *marks])
        found = {index for index, key in enumerate(wanted.keys) if key in self._rank}
        positions = {(index + 1) * layout.block_tokens for index, mark in enumerate(marks) if mark in self._rank}
        plan = plan_fetch(wanted, layout, found, positions)
        if plan.tokens <= usable:
            return self._outcome("absent", usable)
        if not self._worth(plan, usable, self._bytes_by_source(plan, marks)):
            return self._outcome("not_worth", usable)
        self._deadline = min(
            self._not_after, self._deadline + plan.nbytes(layout) / self._settings.least_bytes_per_second
        )
        self._fetch_blocks(plan)
        tokens = self._fetch_snapshot(found, positions, marks) if marks else self._reached * layout.block_tokens
        if self._over:
            return self._outcome("over", usable)
        if tokens <= usable:
            return self._outcome("late", usable)
        return self._outcome("loaded" if tokens >= plan.tokens else "short", tokens)

    # --- what is where ---------------------------------------------------------------------------------------------

    def _look_up(self, keys: Sequence[Key]) -> None:
        """Ask each source for what those before it lack."""
        missing = list(keys)
        for rank, source in enumerate(self._sources):
            # Half of what is left, so that one that hangs leaves time for those behind it.
            now = self._clock()
            answers = source.lookup(missing, now + (self._deadline - now) / 2)
            there = {key for key, has in zip(missing, answers, strict=True) if has}
            self._rank.update(dict.fromkeys(there, rank))
            missing = [key for key in missing if key not in there]
            if not missing:
                break

    def _bytes_by_source(self, plan: FetchPlan, marks: Sequence[Key]) -> dict[Source, int]:
        counts: Counter[Source] = Counter()
        for index in plan.blocks:
            counts[self._sources[self._rank[self._wanted.keys[index]]]] += self._layout.block_bytes
        if plan.snapshot is not None:
            mark = marks[plan.snapshot // self._layout.block_tokens - 1]
            counts[self._sources[self._rank[mark]]] += self._layout.snapshot_bytes
        return dict(counts)

    @property
    def _reached(self) -> int:
        """Leading blocks that are in the pool."""
        return next((index for index, there in enumerate(self._there) if not there), len(self._there))

    # --- blocks ----------------------------------------------------------------------------------------------------

    def _fetch_blocks(self, plan: FetchPlan) -> None:
        """Read the plan's blocks in order and hand them to the pool, until done, late, or broken by a miss."""
        size = self._layout.block_tokens
        entries = [
            Expected(self._wanted.keys[index], EntryKind.BLOCK, (index + 1) * size, self._layout.block_bytes)
            for index in plan.blocks
        ]
        began, until = self._clock(), self._deadline
        if self._layout.has_snapshots:
            until -= SNAPSHOT_SHARE * (self._deadline - began)
        step = max(1, self._settings.read_bytes // self._layout.block_bytes)
        chunks = deque(entries[at : at + step] for at in range(0, len(entries), step))
        window: deque[tuple[list[Expected], list[_Reading]]] = deque()
        whole = True
        while (chunks or window) and whole and not (self._full or self._over):
            while chunks and len(window) < self._settings.window:
                chunk = chunks.popleft()
                window.append((chunk, self._begin(chunk, until)))
            chunk, readings = window.popleft()
            got = self._finish(chunk, readings, until)
            # Behind a gap nothing is of use.
            leading = next((at for at, entry in enumerate(chunk) if entry.key not in got), len(chunk))
            self._adopt([got.pop(entry.key) for entry in chunk[:leading]])
            for fetched in got.values():
                fetched.loaded.release()
            whole = leading == len(chunk)
        for _, readings in window:
            for reading in readings:
                if not reading.future.cancel():
                    reading.future.add_done_callback(release_results)
        self._settle(0)
        for source in self._sources:
            nbytes = self._bytes[source.name]
            if nbytes >= LEAST_MEASURED_BYTES:
                source.measured(nbytes, self._clock() - began)

    def _begin(self, entries: Sequence[Expected], until: float) -> list[_Reading]:
        """One read per source."""
        groups: dict[Source, list[Key]] = {}
        for entry in entries:
            if entry.key in self._rank:
                groups.setdefault(self._sources[self._rank[entry.key]], []).append(entry.key)
        return [
            _Reading(source, tuple(keys), source.get_many(keys, until))
            for source, keys in groups.items()
            if source.alive
        ]

    def _finish(self, entries: Sequence[Expected], readings: Sequence[_Reading], until: float) -> dict[Key, _Fetched]:
        """Results of the reads; what failed is asked for once more from the sources behind."""
        wanted = {entry.key: entry for entry in entries}
        got: dict[Key, _Fetched] = {}

        def take(source: Source, keys: Sequence[Key], results: Sequence[GetResult]) -> None:
            for key, result in zip(keys, results, strict=True):
                if isinstance(result, Loaded):
                    got[key] = _Fetched(wanted[key], source, result)

        for reading in readings:
            expected = [wanted[key] for key in reading.keys]
            take(reading.source, reading.keys, reading.source.results(reading.future, expected, until))
        for rank, source in enumerate(self._sources):
            behind = [key for key in wanted if key not in got and self._rank.get(key, rank) < rank]
            if behind and source.alive and self._clock() < until:
                again = source.get_many(behind, until)
                take(source, behind, source.results(again, [wanted[key] for key in behind], until))
        return got

    # --- the snapshot ----------------------------------------------------------------------------------------------

    def _fetch_snapshot(self, found: set[int], positions: set[int], marks: Sequence[Key]) -> int:
        """The largest snapshot of the blocks that are there now; the prefix that is usable then."""
        size = self._layout.block_tokens
        while not self._over:
            best = plan_fetch(self._wanted, self._layout, found, positions, self._reached)
            if best.tokens <= self._wanted.usable_tokens or best.snapshot is None:
                return best.tokens
            mark = marks[best.tokens // size - 1]
            entry = Expected(mark, EntryKind.SNAPSHOT, best.tokens, self._layout.snapshot_bytes)
            got = self._finish([entry], self._begin([entry], self._deadline), self._deadline)
            self._adopt(list(got.values()))
            self._settle(0)
            if self._snapshots:
                return best.tokens
            positions.discard(best.tokens)
            if self._clock() >= self._deadline:
                break
        return self._wanted.usable_tokens

    # --- into the pool ---------------------------------------------------------------------------------------------

    def _adopt(self, fetched: list[_Fetched]) -> None:
        if not fetched:
            return
        answer = self._pool.adopt([(each.entry.key, each.entry.kind, each.loaded.payload) for each in fetched])
        self._adopting.append((answer, fetched))
        self._settle(self._settings.window)

    def _settle(self, most: int) -> None:
        """Wait until at most `most` adoptions are under way, and give their payloads back."""
        while len(self._adopting) > most:
            answer, fetched = self._adopting.popleft()
            # The engine answers between two steps, which its request would wait for anyway, and refuses when it stops;
            # the payloads may not be given back before.
            error = answer.exception()
            taken = 0 if error is not None else answer.result()
            self._over = self._over or error is not None
            for each in fetched[:taken]:
                self._bytes[each.source.name] += each.entry.length
                if each.entry.kind is EntryKind.BLOCK:
                    self._blocks[each.source.name] += 1
                    self._there[each.entry.tokens // self._layout.block_tokens - 1] = True
                else:
                    self._snapshots += 1
            self._full = self._full or taken < len(fetched)
            for each in fetched:
                if self._keep is not None and each.source.name != OWN_HOST:
                    self._keep(each.loaded.info, each.loaded.payload)
                each.loaded.release()

    def _outcome(self, reason: str, tokens: int) -> LoadOutcome:
        return LoadOutcome(reason, tokens, dict(self._blocks), self._snapshots, dict(self._bytes))
