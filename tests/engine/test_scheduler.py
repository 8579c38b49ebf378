"""Who runs, with how many tokens, and who gives way."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.messages import Credit, Submit


def plan_of(engine: Any) -> list[tuple[str, int, int]]:
    """The next step's chunks as (request, start, length), then run it."""
    plan = engine.scheduler.schedule()
    shown = [(chunk.sequence.live.key.request_id, chunk.start, chunk.length) for chunk in plan.chunks]
    for chunk, result in zip(plan.chunks, engine.runner.run(plan), strict=True):
        engine.runner.commit(chunk, engine.memory)
        engine.role.computed(chunk, result.tokens)
    return shown


def test_decode_never_waits_for_prefill(kit: Any) -> None:
    """Decode rows stand in every step, before the prefill chunks, whatever prompt is being computed."""
    engine = kit.engine(kit.model(slots=False), max_batched_tokens=10)
    engine.apply(Submit(kit.request("a", 8, max_tokens=30)))
    engine.apply(Submit(kit.request("b", 2, max_tokens=30)))
    assert plan_of(engine) == [("a", 0, 8), ("b", 0, 2)]
    engine.apply(Submit(kit.request("long", 100, max_tokens=2)))
    for step in range(12):
        shown = plan_of(engine)
        assert [name for name, _, _ in shown[:2]] == ["a", "b"]
        assert shown[2] == ("long", 8 * step, 8)
        assert sum(length for _, _, length in shown) == 10
    assert plan_of(engine)[2] == ("long", 96, 4)


def test_chunks_end_where_snapshots_are_due(kit: Any) -> None:
    """The last three boundaries of the prompt and `snapshot_at` end a chunk (spec/kv_tier.md)."""
    model = kit.model(slots=True)
    engine = kit.engine(model, max_batched_tokens=500)
    request = kit.request("r", 100, keep_tokens=20, snapshot_at=(32,))
    engine.apply(Submit(request))
    ends = []
    while not ends or ends[-1] < 100:
        ((_, start, length),) = plan_of(engine)
        ends.append(start + length)
    assert ends == [32, 64, 80, 96, 100]
    keys = engine.ledger.get(request.key).sequences[0].block_keys
    held = [16 * (index + 1) for index, key in enumerate(keys) if engine.memory.prefix.find_snapshot(key) is not None]
    assert held == [32, 64, 80, 96]


def test_decode_keeps_the_last_three_snapshots(kit: Any) -> None:
    """Decode takes a snapshot at each boundary it crosses; the last three are kept, the prompt's own stay."""
    engine = kit.engine(kit.model(slots=True))
    engine.apply(Submit(kit.request("r", 17, max_tokens=120)))
    prefix = engine.memory.prefix
    held: list[int] = []
    while engine.step() and len(engine.ledger):
        (live,) = engine.ledger
        keys = live.sequences[0].block_keys
        held = [16 * (i + 1) for i, key in enumerate(keys) if prefix.find_snapshot(key) is not None]
    assert held == [16, 96, 112, 128]


def test_the_youngest_gives_way_and_comes_back_first(kit: Any, model: Any) -> None:
    """Preemption takes the youngest; a newcomer does not overtake it."""
    engine = kit.engine(model, rows=9)
    for name in ("old", "young"):
        engine.apply(Submit(kit.request(name, 40, max_tokens=60)))
    while not engine.scheduler.preempted:
        engine.step()
    engine.apply(Submit(kit.request("new", 10, max_tokens=2)))
    assert [sequence.live.key.request_id for sequence in engine.scheduler.running] == ["old"]
    assert [sequence.live.key.request_id for sequence in engine.scheduler.queue] == ["young", "new"]
    status = engine.status()
    assert (status.preempted, status.waiting, status.running) == (1, 1, 1)
    assert status.spilled_bytes > 0
    (young,) = (live.sequences[0] for live in engine.ledger if live.key.request_id == "young")
    events: list[Any] = []
    while young.spilled is not None or young.computed % kit.block or young.computed < 64:
        engine.step()
        events += engine.drain_events()
    named = [engine.pool.row_region.key_of(row) for row in young.blocks[: young.computed // kit.block]]
    assert named == young.block_keys[: len(named)]
    outcomes = kit.collect([*events, *kit.run(engine)])
    assert outcomes["young"].usage.preemptions == 1
    assert outcomes["old"].usage.preemptions == 0
    assert outcomes["young"].usage.counts.recomputed == 0


def test_recomputation_is_counted_apart(kit: Any, model: Any) -> None:
    """L27: tokens computed again are recomputed; cached + loaded + computed stay the prompt's length."""
    engine = kit.engine(model, rows=9, spill_bytes=0, prefix_reuse=False)
    for name in ("old", "young"):
        engine.apply(Submit(kit.request(name, 40, max_tokens=60)))
    outcomes = kit.collect(kit.run(engine))
    counts = outcomes["young"].usage.counts
    assert (counts.cached, counts.computed) == (0, 40)
    assert counts.recomputed > 40


def test_priority_orders_those_who_never_ran(kit: Any, model: Any) -> None:
    """Larger priority first, then age."""
    engine = kit.engine(model, max_sequences=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", 5)):
        engine.apply(Submit(kit.request(name, 4, priority=priority)))
    assert [sequence.live.key.request_id for sequence in engine.scheduler.queue] == ["c", "d", "a", "b"]


def test_max_sequences_counts_choices_before_the_fork(kit: Any, model: Any) -> None:
    """n choices are booked with the prompt, so that the fork cannot fail."""
    engine = kit.engine(model, max_sequences=4)
    engine.apply(Submit(kit.request("three", 30, n=3)))
    engine.apply(Submit(kit.request("two", 30, n=2)))
    engine.apply(Submit(kit.request("one", 30, n=1)))
    engine.step()
    assert {sequence.live.key.request_id for sequence in engine.scheduler.running} == {"three"}
    assert engine.scheduler.choices_held() == 3
    kit.run(engine)
    assert engine.integrity(idle=True) == ()


@pytest.mark.parametrize("slots", [False, True])
def test_padding_to_buckets_changes_nothing(kit: Any, slots: bool) -> None:
    """Padded decode steps stand on the reserved row and slot; the answer is the same (L5)."""
    model = kit.model(slots=slots)
    requests = [kit.request(f"r{index}", 10 + index, max_tokens=20) for index in range(3)]
    answers = []
    for buckets in ((), (4, 8)):
        engine = kit.engine(model, decode_buckets=buckets)
        for request in requests:
            engine.apply(Submit(request))
        answers.append({name: outcome.tokens for name, outcome in kit.collect(kit.run(engine)).items()})
    assert answers[0] == answers[1]


def test_shared_rows_of_spilled_choices_do_not_stop_the_oldest(kit: Any, model: Any) -> None:
    """L6, L12: choices that wait, and keep the rows they share, lose them when the oldest needs them."""
    engine = kit.engine(model, rows=14)
    engine.apply(Submit(kit.request("old", 16, max_tokens=180)))
    engine.apply(Submit(kit.request("pair", 82, n=2, max_tokens=20)))
    outcomes = kit.collect(kit.run(engine))
    assert outcomes["old"].usage.preemptions == 0
    assert outcomes["pair"].usage.preemptions == 0
    engine = kit.engine(model, rows=14)
    engine.apply(Submit(kit.request("old", 16, max_tokens=180)))
    engine.apply(Submit(kit.request("pair", 82, n=2, max_tokens=90)))
    outcomes = kit.collect(kit.run(engine))
    assert outcomes["old"].usage.preemptions == 0
    assert outcomes["pair"].usage.counts.recomputed > 0
    assert engine.integrity(idle=True) == ()


def test_an_idle_worker_takes_shared_rows_for_the_head_of_its_queue(kit: Any, model: Any) -> None:
    """L6: nobody runs, and the head does not fit beside rows that spilled choices keep: it gets them."""
    engine = kit.engine(model, rows=20, prefix_reuse=False)
    old = kit.request("old", 16, max_tokens=190)
    paused = kit.request("paused", 128, n=2, max_tokens=9, credit=2)
    engine.apply(Submit(old))
    engine.apply(Submit(paused))
    oldest, choices = engine.ledger.get(old.key).sequences[0], engine.ledger.get(paused.key).sequences
    while len(choices) < 2:
        engine.step()
    for choice in choices:
        engine.scheduler.preempt(choice)
    assert [len(choice.blocks) for choice in choices] == [8, 8]
    while oldest.known < 192:
        engine.step()
    assert (len(oldest.blocks), engine.pool.row_region.available) == (12, 0)
    engine.memory.spilled.capacity_bytes = 0
    engine.scheduler.preempt(oldest)
    assert engine.scheduler.running == []
    while oldest.known < 200:
        assert engine.step()
    assert [len(choice.blocks) for choice in choices] == [0, 0]
    engine.apply(Credit(paused.key, 100))
    kit.run(engine)
    assert engine.integrity(idle=True) == ()
