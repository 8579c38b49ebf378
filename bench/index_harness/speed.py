"""What the router's prefix index costs in time: microseconds of a core, which other work of the machine does not change
much."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from bench.index_harness.memory import BATCH, key_batches
from headrace.router.index.base import HolderTier
from headrace.router.index.index import BlockIndex

ROUNDS = 200
HOT_BLOCKS = 30
HOT_RANKS = 1000


@dataclass(frozen=True)
class IndexSpeed:
    """Medians, in microseconds of a core."""

    stored_key_us: float
    """A key of an event of 64 that nobody had."""
    known_key_us: float
    """A key of such an event that another holder has already."""
    single_key_us: float
    """A key in an event of its own, as decode sends them."""
    removed_key_us: float
    cleared_entry_us: float
    """Of a holder that leaves."""
    match_7_us: float
    """A prompt of 7 blocks, 8 ranks."""
    match_1000_us: float
    """A prompt of 1,000 blocks that 8 ranks know to different depths."""
    match_unknown_1000_us: float
    match_hot_us: float
    """30 blocks that each of 1,000 ranks holds, and 970 that one does."""


CASES = tuple(field.name for field in fields(IndexSpeed))


def measure_speed(blocks: int) -> IndexSpeed:
    """On an index of so many blocks over 8 ranks."""
    index = BlockIndex(1 << 28)
    batches = list(key_batches(blocks))
    keys = [key for batch in batches for key in batch]

    def each(work: Callable[[int, list[bytes]], object]) -> float:
        """Microseconds per key over all batches."""
        begin = time.process_time()
        for number, batch in enumerate(batches):
            work(number, batch)
        return 1e6 * (time.process_time() - begin) / blocks

    device = HolderTier.DEVICE
    stored = each(lambda number, batch: index.stored(number % 8, device, batch))
    known = each(lambda number, batch: index.stored(8 + number % 8, device, batch))
    removed = each(lambda number, batch: index.removed(8 + number % 8, device, batch))
    begin, cleared = time.process_time(), index.clear(7)
    clearing = 1e6 * (time.process_time() - begin) / cleared
    begin = time.process_time()
    few = list(key_batches(4096, seed=2))
    for batch in few:
        for key in batch:
            index.stored(0, device, (key,))
    single = 1e6 * (time.process_time() - begin) / 4096
    index.ranks = 8
    prompt = keys[:1000]
    for rank in range(7):
        index.stored(rank, device, prompt[: 100 * rank + 300])
    seven = keys[BATCH * 200 : BATCH * 200 + 7]
    for rank in range(3):
        index.stored(rank, device, seven[: rank + 3])
    match_7 = median_us(lambda: index.match(seven, None, 7))
    match_1000 = median_us(lambda: index.match(prompt, None, 1000))
    strangers = [key for batch in key_batches(1000, seed=3) for key in batch]
    unknown = median_us(lambda: index.match(strangers, None, 1000))
    hot, tail = keys[20_000 : 20_000 + HOT_BLOCKS], keys[30_000:30_970]
    for rank in range(HOT_RANKS):
        index.stored(rank, device, hot)
    index.stored(5, device, tail)
    hot_match = median_us(lambda: index.match(hot + tail, None, 1000))
    return IndexSpeed(stored, known, single, removed, clearing, match_7, match_1000, unknown, hot_match)


def median_us(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Microseconds of a core."""
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return 1e6 * statistics.median(times)
