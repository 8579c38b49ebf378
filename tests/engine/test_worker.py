"""The engine thread: commands in, events out, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.engine.cache_messages import CountPrefixes, ForgetPrefixes, PoolEntries
from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.messages import Cancel, CheckIntegrity, Event, FinishReason, GetStatus, Submit, Usage
from headrace.engine.worker import EngineWorker, monotonic

WAIT_S = 60.0
"""Bound on waiting for another thread; never slept."""


class Inbox:
    """Events of a worker, and a way to wait for the end of requests."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, events: tuple[Event, ...]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def wait_for_ends(self, count: int) -> list[Event]:
        with self._changed:
            assert self._changed.wait_for(
                lambda: sum(isinstance(event, Usage) for event in self.events) >= count, WAIT_S
            ), self.events
            return list(self.events)


@contextmanager
def running(engine: Any) -> Iterator[tuple[EngineWorker, Inbox]]:
    inbox = Inbox()
    worker = EngineWorker(engine, inbox)
    worker.start()
    try:
        yield worker, inbox
    finally:
        worker.stop(WAIT_S)
    assert not worker.alive
    assert engine.integrity(idle=True) == ()


def test_requests_from_many_threads(kit: Any, model: Any) -> None:
    """Every request ends once; the status adds up at every moment it is asked for (L11)."""
    engine = kit.engine(model)
    with running(engine) as (worker, inbox):

        def submit(index: int) -> None:
            worker.call(Submit(kit.request(f"t{index}", 5 + index))).result(WAIT_S)
            assert worker.call(GetStatus()).result(WAIT_S).conservation.holds

        threads = [threading.Thread(target=submit, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        outcomes = kit.collect(inbox.wait_for_ends(8))
        assert len(outcomes) == 8
        assert worker.call(CheckIntegrity(idle=True)).result(WAIT_S) == ()


def test_refusals_and_cancels_come_back_typed(kit: Any, model: Any) -> None:
    """A refused command fails its Future with EngineError; the thread goes on (L13)."""
    with running(kit.engine(model)) as (worker, inbox):
        error = worker.call(Submit(kit.request("bad", [-1]))).exception(WAIT_S)
        assert isinstance(error, EngineError)
        assert error.code is ErrorCode.INVALID_ARGUMENT
        request = kit.request("long", 20, max_tokens=400)
        worker.call(Submit(request)).result(WAIT_S)
        assert worker.call(Cancel(request.key)).result(WAIT_S) is True
        outcome = kit.collect(inbox.wait_for_ends(1))["long"]
        assert outcome.finished[0].reason is FinishReason.CANCELLED


def test_prefixes_are_forgotten_under_running_requests(kit: Any, model: Any) -> None:
    """An operator's call between two steps: a request that holds blocks goes on to the same tokens (L5), a later one
    finds nothing until it is computed again, and nothing stays held (L7, by `running`)."""
    prompt = [20 + index % 50 for index in range(70)]

    def request(name: str) -> Any:
        return kit.request(name, prompt, max_tokens=60, ignore_eos=True, seed=5)

    engine = kit.engine(model)
    with running(engine) as (worker, inbox):
        worker.call(Submit(request("alone"))).result(WAIT_S)
        inbox.wait_for_ends(1)
        assert worker.call(CountPrefixes()).result(WAIT_S).blocks > 0
        worker.call(Submit(request("during"))).result(WAIT_S)
        worker.call(ForgetPrefixes()).result(WAIT_S)
        inbox.wait_for_ends(2)
        worker.call(ForgetPrefixes()).result(WAIT_S)
        assert worker.call(CountPrefixes()).result(WAIT_S) == PoolEntries(0, 0)
        worker.call(Submit(request("after"))).result(WAIT_S)
        outcomes = kit.collect(inbox.wait_for_ends(3))
    assert outcomes["alone"].tokens == outcomes["during"].tokens == outcomes["after"].tokens
    assert outcomes["after"].usage.counts.cached == 0


def test_stopping_ends_what_lives(kit: Any, model: Any) -> None:
    """L28, L6: stop emits terminal events, fails later commands UNAVAILABLE, and leaves nothing held."""
    engine = kit.engine(model, max_sequences=1)
    with running(engine) as (worker, inbox):
        for name in ("running", "waiting"):
            worker.call(Submit(kit.request(name, 20, max_tokens=400))).result(WAIT_S)
    outcomes = kit.collect(inbox.events)
    assert {outcome.finished[0].error.code for outcome in outcomes.values()} == {ErrorCode.UNAVAILABLE}
    error = worker.call(GetStatus()).exception(0)
    assert isinstance(error, EngineError)
    assert error.code is ErrorCode.UNAVAILABLE


def test_expiry_needs_no_new_work(kit: Any, model: Any) -> None:
    """L9: a request without credit idles the engine; its deadline ends it though no command comes."""
    engine = kit.engine(model, clock=monotonic)
    with running(engine) as (worker, inbox):
        request = kit.request("idle", 20, max_tokens=400, credit=0, deadline=monotonic() + 0.05)
        worker.call(Submit(request)).result(WAIT_S)
        outcome = kit.collect(inbox.wait_for_ends(1))["idle"]
        assert outcome.finished[0].reason is FinishReason.DEADLINE


def test_a_fault_outside_any_request_ends_requests_not_the_thread(
    kit: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L13: even a broken scheduler leaves a thread that answers."""
    engine = kit.engine(model)
    schedule = engine.scheduler.schedule
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
    with running(engine) as (worker, inbox):
        worker.call(Submit(kit.request("a", 20))).result(WAIT_S)
        assert kit.collect(inbox.wait_for_ends(1))["a"].finished[0].reason is FinishReason.ERROR
        monkeypatch.setattr(engine.scheduler, "schedule", schedule)
        worker.call(Submit(kit.request("b", 20))).result(WAIT_S)
        assert kit.collect(inbox.wait_for_ends(2))["b"].finished[0].reason is FinishReason.LENGTH
        assert worker.alive
