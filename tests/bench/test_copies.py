"""bench/copies.py measures what it says, between two processes."""

from __future__ import annotations

from bench.copies import measure


def test_one_small_case() -> None:
    report = measure(("cma",), (1, 2), repeat=2)
    assert [row["entries"] for row in report.table] == [1, 2]
    assert all(row["wire"] == "cma" for row in report.table)
    ratios = [float(row["read_ratio"] or 0) for row in report.table]
    assert report.results["cma_read_ratio_to_memcpy"] == max(ratios)
