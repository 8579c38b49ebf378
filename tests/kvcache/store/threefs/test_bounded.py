from __future__ import annotations

import errno
import threading
import time

import pytest

from headrace.kvcache.store.threefs.bounded import BoundedCalls
from tests.kvcache.store.threefs.usrbio_double import fails

SOON = 0.05
LONG = 60.0


def test_results_and_errors_come_back() -> None:
    calls = BoundedCalls(1, "t")
    assert calls.run(lambda: 7, time.monotonic() + LONG) == 7
    with pytest.raises(FileNotFoundError):
        calls.run(lambda: open("/nowhere/at/all"), time.monotonic() + LONG)  # noqa: SIM115
    assert calls.close(LONG)


def test_a_hanging_call_ends_at_its_deadline_and_its_late_result_is_undone() -> None:
    """L6: every wait has a deadline that itself ends the request."""
    calls = BoundedCalls(1, "t")
    hang, undone = threading.Event(), threading.Event()
    results: list[int] = []

    def undo(result: int) -> None:
        results.append(result)
        undone.set()

    def work() -> int:
        hang.wait(LONG)
        return 5

    with pytest.raises(TimeoutError) as caught:
        calls.run(work, time.monotonic() + SOON, undo)
    assert caught.value.errno == errno.ETIMEDOUT
    assert calls.busy == 1
    hang.set()
    assert undone.wait(LONG)
    assert results == [5]
    assert calls.close(LONG)
    assert calls.busy == 0


def test_when_all_threads_hang_calls_are_refused_at_once_and_those_given_up_never_run() -> None:
    """L12: the queue is bounded and says so."""
    calls = BoundedCalls(1, "t")
    hang = threading.Event()
    ran: list[int] = []
    with pytest.raises(TimeoutError):
        calls.run(lambda: hang.wait(LONG), time.monotonic() + SOON)
    for i in range(3):
        with pytest.raises(TimeoutError):
            calls.run(lambda i=i: ran.append(i), time.monotonic())  # type: ignore[misc]
    with fails(errno.EBUSY):
        calls.run(lambda: ran.append(9), time.monotonic() + LONG)
    hang.set()
    assert calls.close(LONG)
    assert ran == []
