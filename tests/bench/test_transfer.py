"""bench/transfer.py measures what it says, between two processes."""

from __future__ import annotations

from bench.transfer import Case, measure_case


def test_one_small_case() -> None:
    table = measure_case(Case("tiny", 4096, (1, 4)), "cma", repeat=2)
    assert [row["rows"] for row in table] == [1, 4]
    for row in table:
        assert row["wire"] == "cma"
        assert all(isinstance(row[name], float) for name in ("gb_per_s", "memcpy", "ratio", "ratio_wire"))
