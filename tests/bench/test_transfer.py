"""bench/transfer.py measures what it says, between two processes."""

from __future__ import annotations

import pytest

from bench.transfer import Case, measure_case


@pytest.mark.parametrize("wire", ["cma", "stream"])
def test_one_small_case(wire: str) -> None:
    table = measure_case(Case("tiny", 4096, (1, 4)), wire, repeat=2)
    assert [row["rows"] for row in table] == [1, 4]
    for row in table:
        assert row["wire"] == wire
        assert all(isinstance(row[name], float) for name in ("gb_per_s", "memcpy", "ratio", "ratio_wire"))
