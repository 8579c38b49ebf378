"""Conservation of live sets, and metrics computed from them."""

from __future__ import annotations

import asyncio
import urllib.request
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.runtime.errors import (
    READER,
    Aborted,
    DeadlineExceeded,
    Incompatible,
    Internal,
    InvalidArgument,
    NeverFits,
    ResourceExhausted,
    Unavailable,
)
from headrace.services.runtime.live import TURNED_AWAY, ConservationError, LiveSet, Outcome
from headrace.services.runtime.metrics import Metrics, MetricsServer


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, *Outcome]))))
def test_the_books_balance_at_every_instant(steps: list[tuple[int, Outcome | None]]) -> None:
    """L11: accepted = live + finished + cancelled + deadline + failed; nothing enters or leaves twice."""
    live = LiveSet[int]("requests")
    inside: set[int] = set()
    for item, outcome in steps:
        if outcome is None:
            if item in inside:
                with pytest.raises(ConservationError):
                    live.enter(item)
            else:
                live.enter(item)
                inside.add(item)
        elif item in inside:
            live.leave(item, outcome)
            inside.remove(item)
        else:
            with pytest.raises(ConservationError):
                live.leave(item, outcome)
        live.check()
        assert set(live) == inside
        assert live.arrived == len(live) + sum(live.ended(one) for one in Outcome)
        assert live.accepted == len(live) + sum(live.ended(one) for one in Outcome if one not in TURNED_AWAY)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(None, Outcome.FINISHED), (ValueError(), Outcome.FAILED), (asyncio.CancelledError(), Outcome.CANCELLED)],
)
def test_a_block_ends_what_it_holds_however_it_ends(error: BaseException | None, outcome: Outcome) -> None:
    """L10, L11."""
    live = LiveSet[str]("requests")
    with nullcontext() if error is None else pytest.raises(type(error)), live.within("a"):
        assert "a" in live
        if error is not None:
            raise error
    assert (len(live), live.ended(outcome)) == (0, 1)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (GeneratorExit(), Outcome.CANCELLED),
        (Aborted("newer"), Outcome.CANCELLED),
        (ResourceExhausted("unread", retry_after_s=1.0, field=READER), Outcome.CANCELLED),
        (ResourceExhausted("full", retry_after_s=1.0), Outcome.REFUSED),
        (DeadlineExceeded("late"), Outcome.DEADLINE),
        (InvalidArgument("wrong"), Outcome.INVALID),
        (NeverFits("long"), Outcome.INVALID),
        (Unavailable("nobody"), Outcome.UNAVAILABLE),
        (Incompatible("other"), Outcome.FAILED),
        (Internal("defect"), Outcome.FAILED),
    ],
)
def test_errors_tell_how_something_ended(error: BaseException, outcome: Outcome) -> None:
    """L11, L12: overload, mistakes and want of workers are not failures, nor each other; what is turned away at the
    door or behind it has arrived and was never accepted."""
    live = LiveSet[str]("requests")
    with pytest.raises(type(error)), live.at_door():
        raise error
    with pytest.raises(type(error)), live.within("a"):
        raise error
    live.check()
    assert (live.arrived, live.ended(outcome)) == (2, 2)
    assert live.accepted == (0 if outcome in TURNED_AWAY else 2)


def test_a_block_may_say_how_it_ended() -> None:
    live = LiveSet[str]("requests")
    with live.within("a") as ending:
        ending.outcome = Outcome.DEADLINE
    assert live.ended(Outcome.DEADLINE) == 1


def test_gauges_are_read_when_asked() -> None:
    """L11: a gauge is the size of the set, read at the scrape, not a number that is kept beside it."""
    metrics = Metrics(role="decode")
    held: set[int] = set()
    live = LiveSet[int]("requests")
    metrics.gauge("rows_used", "Rows in use", lambda: len(held))
    metrics.live_set("requests", "Requests", live)
    held.update(range(7))
    live.enter(1)
    live.enter(2)
    live.leave(1, Outcome.DEADLINE)
    assert metrics.value("headrace_rows_used") == 7
    assert metrics.value("headrace_requests_live") == 1
    assert metrics.value("headrace_requests_arrived_total") == 2
    assert metrics.value("headrace_requests_ended_total", outcome="deadline") == 1
    assert metrics.value("headrace_info", role="decode") == 1


def test_two_processes_worth_of_metrics_do_not_meet() -> None:
    one, two = Metrics(), Metrics()
    one.counter("tokens", "Tokens").inc()
    two.counter("tokens", "Tokens")
    assert one.value("headrace_tokens_total") == 1
    assert two.value("headrace_tokens_total") == 0
    with pytest.raises(ValueError, match="Duplicated"):
        one.gauge("tokens", "again", lambda: 0)


def test_the_endpoint_serves_and_frees_its_port() -> None:
    metrics = Metrics()
    metrics.histogram("step_seconds", "Steps").observe(0.01)
    server = MetricsServer(metrics, "127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as response:
        page = response.read().decode()
    server.close()
    assert 'headrace_step_seconds_bucket{le="0.01"} 1.0' in page
    assert "process_resident_memory_bytes" in page
    again = MetricsServer(metrics, "127.0.0.1", server.port)
    again.close()
