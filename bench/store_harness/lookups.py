"""The index: batched lookups a second, and bytes a block."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.kvcache.entries import EntryKind, RetentionClass
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.index.sqlite import SqliteIndex

_BATCH = 1_000
_REPEATS = 5
_ROWS_PER_SEGMENT = 2_259
"""Records of 118,784 B in 256 MiB."""


@dataclass(frozen=True)
class IndexFigures:
    rows: int
    lookups_per_s: float
    """Batches of 1,000 known keys, from the dict in front."""
    cold_lookups_per_s: float
    """The same from SQLite, as in a process that has just started."""
    puts_per_s: float
    """Batches of 500 rows, each synced."""
    bytes_per_block: float
    """Of the SQLite file and its log."""


def measure_index(directory: Path, rows: int) -> IndexFigures:
    """An index of that many rows in a file of its own."""
    deadline = time.monotonic() + 600
    path = directory / "lookups.sqlite"
    index = SqliteIndex(path, cached_rows=rows)
    namespace, tag = hashlib.sha256(b"n").hexdigest(), bytes(16)
    keys = [hashlib.sha256(number.to_bytes(8, "little")).digest() for number in range(rows)]
    all_rows = [
        IndexRow(
            key=key,
            group=f"v1/{namespace}/chat/1800000000/node-0123456789abcdef-{number // _ROWS_PER_SEGMENT}.seg",
            place=number % _ROWS_PER_SEGMENT * 118_784,
            length=114_048,
            kind=EntryKind.BLOCK,
            retention=RetentionClass.CHAT,
            tokens=128 * (number % 1_000 + 1),
            expires_at=1_800_000_000,
            tenant_tag=tag,
        )
        for number, key in enumerate(keys)
    ]
    started = time.perf_counter()
    for start in range(0, rows, 500):
        index.put_many(all_rows[start : start + 500], deadline)
    puts = rows / (time.perf_counter() - started)
    warm = max(_lookups(index, keys, deadline) for _ in range(_REPEATS))
    nbytes = index.stats(deadline).nbytes
    index.close()
    cold = SqliteIndex(path, cached_rows=0)
    cold_lookups = max(_lookups(cold, keys, deadline) for _ in range(2))
    cold.close()
    return IndexFigures(rows, warm, cold_lookups, puts, nbytes / rows)


def _lookups(index: SqliteIndex, keys: list[bytes], deadline: float) -> float:
    started = time.perf_counter()
    for start in range(0, len(keys), _BATCH):
        if not all(index.get_many(keys[start : start + _BATCH], deadline)):
            raise OSError("the index lost rows")
    return len(keys) / (time.perf_counter() - started)
