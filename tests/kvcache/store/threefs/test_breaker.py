from __future__ import annotations

import pytest

from headrace.kvcache.store.threefs.breaker import BreakerSettings, CircuitBreaker, State


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(**changes: float) -> tuple[CircuitBreaker, Clock, list[float]]:
    clock = Clock()
    opened: list[float] = []
    settings = BreakerSettings(**({"timeouts_in_row": 3, "first_pause_s": 1.0, "longest_pause_s": 5.0} | changes))
    return CircuitBreaker(settings, clock, lambda: opened.append(clock.now)), clock, opened


def test_opens_after_timeouts_with_no_answer_between() -> None:
    """L17: a dead target is decided once."""
    breaker, _, opened = make()
    for _ in range(2):
        breaker.timed_out()
    breaker.answered()
    for _ in range(2):
        breaker.timed_out()
    assert breaker.allows()
    assert opened == []
    breaker.timed_out()
    assert not breaker.allows()
    assert opened == [100.0]
    assert breaker.opened == 1


def test_a_vanished_mount_opens_at_once_and_only_once() -> None:
    breaker, _, opened = make()
    breaker.trip()
    breaker.trip()
    breaker.timed_out()
    assert breaker.state is State.OPEN
    assert len(opened) == 1


def test_one_probe_at_a_time_and_pauses_double_to_a_limit() -> None:
    breaker, clock, _ = make()
    breaker.trip()
    pauses = []
    for _ in range(5):
        pause = breaker.probe_in()
        assert pause is not None
        pauses.append(pause)
        assert not breaker.begin_probe()
        clock.now += pause
        assert breaker.begin_probe()
        assert breaker.state is State.HALF_OPEN
        assert not breaker.begin_probe()
        assert breaker.probe_in() is None
        assert not breaker.allows()
        breaker.end_probe(False)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_good_probe_closes_and_the_next_failure_starts_with_the_first_pause() -> None:
    breaker, clock, opened = make()
    breaker.trip()
    clock.now += 1.0
    assert breaker.begin_probe()
    breaker.end_probe(True)
    assert breaker.allows()
    assert breaker.probe_in() is None
    breaker.timed_out()
    assert breaker.allows()  # counting began again
    breaker.trip()
    assert breaker.probe_in() == 1.0
    assert len(opened) == 2


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="first_pause_s"):
        BreakerSettings(first_pause_s=2.0, longest_pause_s=1.0)
