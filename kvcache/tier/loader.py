"""Fetch prefixes from the tiers below the device pool: what a worker's loads share. One load is load.py.

The order of sources is own host tier, peers' host tiers, store; each block comes from the first that has it, and from a
later one if that read fails. Every failure is a miss counted by cause; nothing is raised (L17).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from headrace.kvcache.entries import EntryInfo, TierSource
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.tier.load import Load, LoadOutcome, LoadSettings, PoolSide
from headrace.kvcache.tier.plan import FetchPlan, Wanted, pays
from headrace.kvcache.tier.sources import Source
from headrace.kvcache.tier.stats import LoaderStats


class TierLoader:
    """Serves the loads of one worker; each runs on its caller's thread."""

    def __init__(
        self,
        sources: Sequence[TierSource],
        layout: KVLayout,
        settings: LoadSettings,
        *,
        token_seconds: Callable[[], float | None] = lambda: None,
        keep: Callable[[EntryInfo, memoryview], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sources` in order of preference. `token_seconds`: measured time to compute a prompt token (break-even).
        `keep` takes what came from elsewhere than the own host tier: a put into it."""
        self._keep = keep
        self._layout = layout
        self._settings = settings
        self._clock = clock
        self._token_seconds = token_seconds
        self._sources = [Source(source, settings.threads, clock) for source in sources]
        self._lock = threading.Lock()
        self._stats = LoaderStats()

    def load(
        self, wanted: Wanted, pool: PoolSide, *, asked_at: float | None = None, not_after: float = float("inf")
    ) -> LoadOutcome:
        """Make the largest prefix usable that the tiers have and that pays. Blocks until done or late.

        Monotonic seconds: `asked_at`, from which the deadline counts (now), and `not_after`, the request's own.
        """
        began = self._clock() if asked_at is None else asked_at
        alive = [source for source in self._sources if source.alive]
        load = Load(
            wanted, self._layout, self._settings, alive, pool, self._pays, self._keep, self._clock, began, not_after
        )
        outcome = load.run()
        with self._lock:
            self._stats.loads[outcome.reason] += 1
            self._stats.asked_tokens += len(wanted.keys) * self._layout.block_tokens - wanted.usable_tokens
            self._stats.seconds += self._clock() - began
            self._stats.nbytes.update(outcome.nbytes_by_source)
            self._stats.hit_tokens.update(
                {name: blocks * self._layout.block_tokens for name, blocks in outcome.blocks_by_source.items()}
            )
        return outcome

    def stats(self) -> LoaderStats:
        """A copy of the counters."""
        with self._lock:
            stats = LoaderStats(
                loads=Counter(self._stats.loads),
                asked_tokens=self._stats.asked_tokens,
                hit_tokens=Counter(self._stats.hit_tokens),
                nbytes=Counter(self._stats.nbytes),
                seconds=self._stats.seconds,
            )
        for source in self._sources:
            stats.misses.update({(source.name, cause.value): count for cause, count in source.missed().items()})
        return stats

    def close(self) -> None:
        """No load is under way any more."""
        for source in self._sources:
            source.close()

    def _pays(self, plan: FetchPlan, usable_tokens: int, sources: Mapping[Source, int]) -> bool:
        """`sources`: bytes that would come from each."""
        speeds = {source: source.bytes_per_second for source in sources}
        seconds: float | None = None
        if self._settings.break_even and all(speed is not None for speed in speeds.values()):
            seconds = sum(count / (speeds[source] or 1.0) for source, count in sources.items())
        return pays(plan, usable_tokens, seconds, self._token_seconds(), self._settings.least_tokens)
