"""CircuitBreaker by an injected clock."""

from __future__ import annotations

from headrace.kvcache.index.breaker import CircuitBreaker


def test_failures_open_it_for_longer_each_time_and_one_success_closes_it() -> None:
    """L17: a dead target is decided once, and probed ever more rarely."""
    now = [100.0]
    breaker = CircuitBreaker(1.0, 4.0, monotonic=lambda: now[0])
    assert breaker.allow()
    assert breaker.allow()
    for wait in (1.0, 2.0, 4.0, 4.0):
        breaker.failed()
        assert breaker.is_open
        now[0] += wait - 0.01
        assert not breaker.allow()
        now[0] += 0.01
        assert breaker.allow(), "the probe"
        assert not breaker.allow(), "one at a time"
    breaker.succeeded()
    assert breaker.allow()
    assert not breaker.is_open
    breaker.failed()
    now[0] += 1.0
    assert breaker.allow(), "waits begin short again"


def test_a_probe_that_never_reports_is_followed_by_another() -> None:
    now = [0.0]
    breaker = CircuitBreaker(1.0, 4.0, monotonic=lambda: now[0])
    breaker.failed()
    now[0] += 1.0
    assert breaker.allow()
    now[0] += 1.0
    assert breaker.allow()


def test_calls_that_were_under_way_when_it_opened_change_nothing() -> None:
    """L17: sixteen readers that fail together are one failure, so that a server that is back is soon asked again."""
    now = [0.0]
    breaker = CircuitBreaker(1.0, 4.0, monotonic=lambda: now[0])
    for _ in range(16):
        breaker.failed()
        now[0] += 0.01
    now[0] = 1.0
    assert breaker.allow()
    breaker.failed()
    now[0] += 1.99
    assert not breaker.allow()
