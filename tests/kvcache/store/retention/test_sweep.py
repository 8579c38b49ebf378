from __future__ import annotations

from headrace.kvcache.store.retention.sweep import ClockGuard, ClockReading


def test_nothing_while_the_shared_clock_says_another_time() -> None:
    guard = ClockGuard()
    assert guard.refusal(ClockReading(1_000.0, 5.0, 1_059.0)) == ""
    assert "off the index server" in guard.refusal(ClockReading(1_010.0, 15.0, 1_071.0))
    assert "off the index server" in guard.refusal(ClockReading(1_020.0, 25.0, 950.0))
    assert guard.refusal(ClockReading(1_030.0, 35.0, 1_030.0)) == ""


def test_nothing_in_the_pass_after_a_jump() -> None:
    guard = ClockGuard()
    assert guard.refusal(ClockReading(1_000.0, 5.0, None)) == ""
    assert "jumped by +90000 s" in guard.refusal(ClockReading(91_010.0, 15.0, None))
    assert guard.refusal(ClockReading(91_020.0, 25.0, None)) == ""
    assert "jumped by -61 s" in guard.refusal(ClockReading(90_969.0, 35.0, None))


def test_slow_passes_are_no_jump() -> None:
    guard = ClockGuard()
    assert guard.refusal(ClockReading(1_000.0, 5.0, None)) == ""
    assert guard.refusal(ClockReading(8_200.0, 7_205.0, None)) == ""
