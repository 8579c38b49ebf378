"""A tier source as the loader uses it: its own threads, how fast it is, and whether it is dead (L17)."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from headrace.kvcache.entries import EntryKind, GetResult, Loaded, Miss, TierSource
from headrace.kvcache.keys import Key

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
"""A source that failed as a whole is left alone, each time twice as long, until it answers again."""
MEMORY = 0.3
"""Weight of the newest measurement of its bandwidth."""
FORGET_S = 30.0
"""A measurement this old says nothing: the source is tried again."""


@dataclass(frozen=True)
class Expected:
    """An entry to fetch, as the request knows it."""

    key: Key
    kind: EntryKind
    tokens: int
    """Position at its end."""
    length: int


class Source:
    """Wraps one TierSource. Thread-safe. Calls run on threads of its own, so that a source that hangs past its
    deadline takes none of another's."""

    def __init__(self, source: TierSource, threads: int, clock: Callable[[], float]) -> None:
        self.source = source
        self.name = source.name
        self._clock = clock
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"tier-{source.name}")
        self._lock = threading.Lock()
        self._pause = FIRST_PAUSE_S
        self._dead_until = self._last_hit = self._measured_at = float("-inf")
        self._speed: float | None = None
        self._misses: Counter[Miss] = Counter()

    @property
    def alive(self) -> bool:
        """May be asked."""
        return self._clock() >= self._dead_until

    @property
    def bytes_per_second(self) -> float | None:
        """As measured lately."""
        return self._speed if self._clock() - self._measured_at < FORGET_S else None

    def missed(self) -> Counter[Miss]:
        """Misses by cause since start."""
        with self._lock:
            return Counter(self._misses)

    def lookup(self, keys: Sequence[Key], deadline: float) -> Sequence[bool]:
        """Which keys it probably has; none when it is dead or late, which is decided here once for all keys."""
        nothing = [False] * len(keys)
        if not keys or not self.alive:
            return nothing
        asked = self._threads.submit(self.source.lookup, keys, deadline)
        try:
            return asked.result(max(0.0, deadline - self._clock()))
        except FutureTimeout:
            asked.cancel()
            self._note([Miss.TIMEOUT] * len(keys))
        except Exception:
            logger.exception("lookup in tier %s failed", self.name)
            self._note([Miss.SERVER] * len(keys))
        return nothing

    def get_many(self, keys: Sequence[Key], deadline: float) -> Future[Sequence[GetResult]]:
        """Begin a read, whose outcome `results` takes."""
        return self._threads.submit(self.source.get_many, list(keys), deadline)

    def results(
        self, reading: Future[Sequence[GetResult]], expected: Sequence[Expected], deadline: float
    ) -> Sequence[GetResult]:
        """The outcome of a read, checked against what was asked for (L3). Late results are misses, and given back when
        they come (L17)."""
        results: Sequence[GetResult]
        try:
            results = [
                self._checked(result, entry)
                for result, entry in zip(reading.result(max(0.0, deadline - self._clock())), expected, strict=True)
            ]
        except FutureTimeout:
            if not reading.cancel():
                reading.add_done_callback(release_results)
            results = [Miss.TIMEOUT] * len(expected)
        except Exception:
            logger.exception("a read of tier %s failed", self.name)
            results = [Miss.SERVER] * len(expected)
        self._note(results)
        return results

    def measured(self, nbytes: int, seconds: float) -> None:
        """It gave so many bytes in this time, with several reads under way."""
        speed = nbytes / max(seconds, 1e-6)
        with self._lock:
            known = self.bytes_per_second
            self._speed = speed if known is None else (1 - MEMORY) * known + MEMORY * speed
            self._measured_at = self._clock()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _checked(self, result: GetResult, entry: Expected) -> GetResult:
        if not isinstance(result, Loaded):
            return result
        info = result.info
        if (info.key, info.kind, info.tokens, info.length) == (entry.key, entry.kind, entry.tokens, entry.length):
            return result
        result.release()
        return Miss.HEADER

    def _note(self, results: Sequence[GetResult]) -> None:
        now = self._clock()
        with self._lock:
            self._misses.update(result for result in results if not isinstance(result, Loaded))
            if any(isinstance(result, Loaded) for result in results):
                self._pause, self._last_hit = FIRST_PAUSE_S, now
            # Late although it delivers is slow, and what came was of use. Late and silent is dead.
            silent = now - self._last_hit > FIRST_PAUSE_S
            if (Miss.NOT_CONNECTED in results or (Miss.TIMEOUT in results and silent)) and now >= self._dead_until:
                self._dead_until = now + self._pause
                self._pause = min(2 * self._pause, LONGEST_PAUSE_S)


def release_results(reading: Future[Sequence[GetResult]]) -> None:
    """Give back what a read brought that nobody waits for."""
    if reading.cancelled() or reading.exception() is not None:
        return
    for result in reading.result():
        if isinstance(result, Loaded):
            result.release()
