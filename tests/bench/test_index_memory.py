"""The prefix index stays inside the issue's bytes per block and holder (L24), as growth of a process's resident set."""

from __future__ import annotations

from bench.index_harness.memory import measure
from bench.index_harness.speed import CASES, measure_speed
from bench.index_memory import FIRST_BYTES, FURTHER_BYTES, as_report


def test_bytes_per_block_and_holder() -> None:
    """L24: 64 bytes for a block and its first holder, 8 for a further one; growing never takes twice as much. Three
    hundred thousand blocks: fewer are drowned in the 2 MiB pages of the columns' ends."""
    memory = measure(300_000, 1)
    assert memory.first_holder_bytes <= FIRST_BYTES
    assert memory.further_holder_bytes <= FURTHER_BYTES
    assert memory.first_peak_bytes <= 1.5 * memory.first_holder_bytes
    assert memory.accounted_bytes <= memory.resident_bytes


def test_the_report_says_what_was_measured() -> None:
    memory = measure(20_000, 1)
    report = as_report([memory], measure_speed(65_536))
    assert set(CASES) == set(report.results["core_us"])  # type: ignore[arg-type]
    assert all(value > 0 for value in report.results["core_us"].values())  # type: ignore[union-attr, operator]
    assert report.table[0]["blocks"] == 20_000
