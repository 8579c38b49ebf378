"""Requests whose client reads slowly, on a clock that the test turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.engine.errors import ErrorCode
from headrace.engine.messages import Credit, FinishReason, Submit
from headrace.engine.sequence import State

SPILL_S, END_S = 5.0, 30.0


def paused(kit: Any, model: Any, n: int = 1, **settings: Any) -> tuple[Any, Any, Any, list[Any]]:
    """An engine with one request that has run to the end of its credit."""
    clock = kit.clock()
    engine = kit.engine(model, clock=clock, pause_spill_s=SPILL_S, pause_end_s=END_S, **settings)
    request = kit.request("slow", 30, n=n, max_tokens=20, credit=3 * n)
    engine.apply(Submit(request))
    while engine.step():
        pass
    return engine, clock, request, list(engine.drain_events())


def test_memory_waits_a_while_and_is_then_spilled(kit: Any, model: Any) -> None:
    """L5, L6: at a step boundary, on the engine's clock and without any command; with credit it goes on with the same
    tokens."""
    for n in (1, 2):
        whole = kit.engine(model)
        engine, clock, request, events = paused(kit, model, n)
        whole.apply(Submit(replace(request, credit=None)))
        expected = kit.collect(kit.run(whole))["slow"].tokens
        live = engine.ledger.get(request.key)
        assert engine.next_expiry() == live.paused_at + SPILL_S
        clock.now += SPILL_S - 0.1
        assert not engine.step()
        assert {sequence.state for sequence in live.sequences} == {State.RUNNING}
        clock.now += 0.1
        engine.step()
        assert [sequence.spilled is not None for sequence in live.sequences] == [True] * n
        kept = {block for sequence in live.sequences for block in sequence.blocks}  # what choices share stays
        assert engine.pool.row_region.available == engine.pool.row_region.capacity - len(kept)
        assert len(kept) < engine.pool.layout.blocks_for(live.sequences[0].known)
        assert (engine.status().preempted, engine.scheduler.returning) == (n, 0)
        assert engine.next_expiry() == live.paused_at + END_S
        engine.apply(Credit(request.key, 1000))
        events += kit.run(engine)
        assert kit.collect(events)["slow"].tokens == expected
        assert engine.integrity(idle=True) == ()


def test_credit_in_time_begins_the_wait_anew(kit: Any, model: Any) -> None:
    """A client that reads a little every now and then keeps its memory and its request."""
    engine, clock, request, _ = paused(kit, model)
    live = engine.ledger.get(request.key)
    for limit in range(4, 12):
        clock.now += SPILL_S - 0.5
        engine.apply(Credit(request.key, limit))
        while engine.step():
            pass
        assert live.paused_at == clock.now
        assert live.sequences[0].state is State.RUNNING
    assert clock.now > END_S


def test_it_ends_at_last(kit: Any, model: Any) -> None:
    """L12, L28: overload of its own making: one terminal event per choice, nothing held."""
    engine, clock, request, events = paused(kit, model, 2)
    clock.now += SPILL_S
    engine.step()
    clock.now += END_S - SPILL_S
    assert engine.step()
    outcome = kit.collect([*events, *engine.drain_events()])["slow"]
    assert [outcome.finished[choice].reason for choice in (0, 1)] == [FinishReason.ERROR] * 2
    assert {outcome.finished[choice].error.code for choice in (0, 1)} == {ErrorCode.TOO_SLOW}
    assert engine.ledger.get(request.key) is None
    assert engine.integrity(idle=True) == ()


def test_others_have_its_place(kit: Any, model: Any) -> None:
    """L12: a worker of one slot serves somebody else meanwhile, and the slow one when it reads on."""
    engine, clock, request, events = paused(kit, model, max_sequences=1)
    engine.apply(Submit(kit.request("quick", 20, max_tokens=5)))
    clock.now += SPILL_S
    while engine.step():
        pass
    events += engine.drain_events()
    assert kit.collect(events)["quick"].finished[0].reason is FinishReason.LENGTH
    engine.apply(Credit(request.key, 1000))
    events += kit.run(engine)
    assert kit.collect(events)["slow"].finished[0].reason is FinishReason.LENGTH
    assert engine.integrity(idle=True) == ()
