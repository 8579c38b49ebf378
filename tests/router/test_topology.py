"""router.topology: what a rank can hold, and what its requests weigh."""

from __future__ import annotations

from headrace.router.topology import Candidate, RankId, Role


def test_what_crosses_is_whole_blocks_and_the_slot() -> None:
    rank = Candidate(RankId("p", "1"), Role.PREFILL, "dc", "h", 100, 8, 128, 4096, row_bytes=1000, slot_bytes=70)
    assert [rank.kv_bytes(tokens) for tokens in (1, 128, 129)] == [1070, 1070, 2070]
