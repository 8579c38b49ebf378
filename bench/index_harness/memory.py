"""What the router's prefix index costs in memory: growth of the process's resident set, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.router.index.base import HolderTier
from headrace.router.index.index import BlockIndex

BATCH = 64
"""Keys of an event: a prefill chunk of 8,192 tokens in blocks of 128."""


@dataclass(frozen=True)
class IndexMemory:
    """Bytes of resident memory per pair of block and holder."""

    blocks: int
    first_holder_bytes: float
    """Per block with its first holder."""
    further_holder_bytes: float
    """Per holder that a block has beside the first, over `holders` of them."""
    holders: int
    first_peak_bytes: float
    """The highest resident set on the way, per block."""
    accounted_bytes: int
    """What the index says of itself in the end."""
    resident_bytes: int
    """What the process grew by."""


def measure(blocks: int, holders: int, budget_bytes: int = 1 << 30) -> IndexMemory:
    """In a fresh process, since memory that others have freed would hide growth."""
    command = [sys.executable, "-m", "bench.index_harness.memory", str(blocks), str(holders), str(budget_bytes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ))
    return IndexMemory(**json.loads(done.stdout))


def key_batches(blocks: int, seed: int = 1) -> Iterator[list[bytes]]:
    """Keys as good as random, never all in memory at once."""
    for first in range(0, blocks, BATCH):
        count = min(BATCH, blocks - first)
        yield [_mixed(seed * (1 << 40) + first + number) for number in range(count)]


def _mixed(number: int) -> bytes:
    """32 bytes that look like a digest and cost less (splitmix64, four times)."""
    out = b""
    for _ in range(4):
        number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        out += (mixed ^ mixed >> 31).to_bytes(8, "little")
    return out


def resident_bytes() -> int:
    """Of this process now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _grow(blocks: int, holders: int, budget_bytes: int) -> IndexMemory:
    for _ in key_batches(BATCH * 4):
        pass
    index = BlockIndex(budget_bytes)
    before = peak = resident_bytes()
    for number, keys in enumerate(key_batches(blocks)):
        index.stored(0, HolderTier.DEVICE, keys)
        if number % 256 == 0:
            peak = max(peak, resident_bytes())
    first = resident_bytes()
    peak = max(peak, first)
    for holder in range(1, holders + 1):
        for keys in key_batches(blocks):
            index.stored(holder, HolderTier.DEVICE, keys)
    last = resident_bytes()
    assert index.entries == blocks * (holders + 1), "the budget is too small for the measurement"
    further = (last - first) / (blocks * holders) if holders else 0.0
    return IndexMemory(
        blocks, (first - before) / blocks, further, holders, (peak - before) / blocks, index.nbytes, last - before
    )


if __name__ == "__main__":
    print(json.dumps(asdict(_grow(*map(int, sys.argv[1:4])))))
