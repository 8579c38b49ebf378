"""bench.tier_faults judges what it measured; the faults themselves are tests/kvcache/store/seaweedfs/test_faults.py."""

from __future__ import annotations

from dataclasses import replace

from bench.tier_faults import kept, row_of
from bench.tier_harness.faults import KillReport, LossReport

KILL = KillReport(100, 20, 100, 0, 0, 54.0, 10.0, {})
LOSS = LossReport(100, 500.0, 20.0, 1_000, 0, {"not_connected": 1_000}, 3.0, 100, [1, 0], 0.99, 0)


def test_one_lost_block_or_one_wrong_answer_is_a_failure() -> None:
    assert kept(row_of("seaweed_kill", KILL))
    assert not kept(row_of("seaweed_kill", replace(KILL, read_back=99)))
    assert not kept(row_of("seaweed_kill", replace(KILL, wrong=1)))
    assert kept(row_of("redis_segments", LOSS))
    assert not kept(row_of("redis_segments", replace(LOSS, hit_ratio=0.98)))
    assert not kept(row_of("redis_seaweed", replace(LOSS, wrong=1)))
