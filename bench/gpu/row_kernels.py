"""What a device does around a push of rows, each part alone: gather, checksum, verified copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.gpu.rows import pattern
from headrace.kernels.reference import rows as reference
from headrace.kernels.rows import row_ops

TURNS = 20


@dataclass(frozen=True)
class RowKernels:
    """One number of rows; medians in µs from the call until the host knows that it is done."""

    rows: int
    gather_us: float
    checksum_us: float
    """By the backend in use."""
    checksum_reference_us: float
    copy_and_check_us: float
    """The receiver's: landing rows to pool rows, summed."""
    backend: str


def measure_kernels(device: int, *, row_bytes: int = 114_048, counts: Sequence[int] = (8, 64, 512)) -> list[RowKernels]:
    """Rows scattered over a pool, on one GPU."""
    pool = pattern(2 * max(counts), row_bytes, device)
    return [_one(pool, count) for count in counts]


def _one(pool: torch.Tensor, count: int) -> RowKernels:
    scattered = torch.arange(0, 2 * count, 2, device=pool.device)
    dense = torch.arange(count, device=pool.device)
    staged, other = torch.zeros_like(pool[:count]), torch.zeros_like(pool)
    ops = row_ops("cuda")
    return RowKernels(
        rows=count,
        gather_us=_median_us(lambda: reference.gather_rows(pool, scattered, staged)),
        checksum_us=_median_us(lambda: ops.checksum(staged, dense)),
        checksum_reference_us=_median_us(lambda: reference.checksum_rows(staged, dense)),
        copy_and_check_us=_median_us(lambda: ops.copy_checksummed(staged, dense, other, scattered)),
        backend=ops.backend,
    )


def _median_us(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TURNS + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times[3:]) * 1e6, 1)
