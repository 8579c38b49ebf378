"""L5: the same answer by every way through one engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.messages import Submit
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.seeds import choice_seed


def answers(kit: Any, engine: Any, requests: list[Any]) -> dict[str, Any]:
    for request in requests:
        engine.apply(Submit(request))
    outcomes = kit.collect(kit.run(engine))
    assert engine.integrity(idle=True) == ()
    for outcome in outcomes.values():
        assert outcome.offsets_ok
        assert all(end.reason in kit.done for end in outcome.finished.values()), outcome
    return {name: (outcome.tokens, outcome.text) for name, outcome in outcomes.items()}


def prompts(kit: Any, **changes: Any) -> list[Any]:
    return [kit.request(f"r{length}", length, **changes) for length in (1, 15, 16, 17, 40, 100, 129)]


@pytest.fixture
def one_shot(kit: Any, model: Any) -> Any:
    """Every request by itself, the whole prompt in one chunk where snapshots do not cut it."""

    def run(requests: list[Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for request in requests:
            result |= answers(kit, kit.engine(model, max_batched_tokens=512, prefix_reuse=False), [request])
        return result

    return run


@pytest.mark.parametrize("budget", [9, 23, 64, 512])
def test_chunks_and_batches_change_nothing(kit: Any, model: Any, one_shot: Any, budget: int) -> None:
    """L5: one-shot = chunked = batched."""
    requests = prompts(kit, max_tokens=20)
    assert answers(kit, kit.engine(model, max_batched_tokens=budget), requests) == one_shot(requests)


@pytest.mark.parametrize("spill_bytes", [0, 4000, 1 << 20], ids=["recomputed", "mixed", "spilled"])
def test_preemption_changes_nothing(kit: Any, model: Any, one_shot: Any, spill_bytes: int) -> None:
    """L5, L12: preempted and resumed, and recomputed with its N₀, give the tokens of an undisturbed run."""
    requests = [kit.request(f"p{length}", length, max_tokens=90) for length in (30, 45, 60, 75)]
    engine = kit.engine(model, rows=14, spill_bytes=spill_bytes)
    assert answers(kit, engine, requests) == one_shot(requests)
    assert engine.scheduler.preemptions > 0


def test_prefix_hits_change_nothing(kit: Any, model: Any, one_shot: Any) -> None:
    """L5, L4: a cached prefix gives the tokens of a computed one, and is counted as cached (L27)."""
    first = kit.request("first", 100)
    longer = kit.request("longer", [*first.prompt_ids, *kit.request("tail", 37).prompt_ids])
    again = kit.request("again", list(first.prompt_ids))
    engine = kit.engine(model)
    got = answers(kit, engine, [first])
    engine.apply(Submit(longer))
    events = kit.run(engine)
    engine.apply(Submit(again))
    events += kit.run(engine)
    outcomes = kit.collect(events)
    got |= {name: (outcome.tokens, outcome.text) for name, outcome in outcomes.items()}
    assert got == one_shot([first, longer, again])
    assert outcomes["longer"].usage.counts.cached == 96
    expected = 96 if not model.layout.has_snapshots else 80
    assert outcomes["again"].usage.counts.cached == expected
    for outcome in outcomes.values():
        counts = outcome.usage.counts
        assert counts.cached + counts.loaded + counts.computed == outcome.usage.prompt_tokens
        assert counts.recomputed == 0


def test_next_turn_hits_what_decode_computed(kit: Any, model: Any, one_shot: Any) -> None:
    """L5: blocks and snapshots that decode made serve the next turn of the chat."""
    first = kit.request("turn1", 40, max_tokens=70)
    engine = kit.engine(model)
    got = answers(kit, engine, [first])
    reply = got["turn1"][0][0]
    second = kit.request("turn2", [*first.prompt_ids, *reply, *kit.request("user", 20).prompt_ids])
    engine.apply(Submit(second))
    outcomes = kit.collect(kit.run(engine))
    assert {"turn2": (outcomes["turn2"].tokens, outcomes["turn2"].text)} == one_shot([second])
    assert outcomes["turn2"].usage.counts.cached == 96


@pytest.mark.parametrize("delivered", [1, 4, 9, 300], ids=["1", "W", "K+1", "300"])
def test_a_continuation_elsewhere_is_the_same_stream(kit: Any, model: Any, delivered: int) -> None:
    """L5, L15: prompt + delivered tokens on another worker, N₀ kept, continues with the same tokens and offsets."""
    sampling = SamplingParams(temperature=1.0)
    whole = kit.request("c", 50, max_tokens=310, n=2, sampling=sampling)
    tokens = answers(kit, kit.engine(model), [whole])["c"][0]
    resumed = replace(whole, delivered=(tuple(tokens[0][:delivered]), tuple(tokens[1][: delivered // 2])))
    engine = kit.engine(model, max_batched_tokens=17)
    engine.apply(Submit(resumed))
    outcome = kit.collect(kit.run(engine))["c"]
    assert outcome.tokens == {0: tokens[0][delivered:], 1: tokens[1][delivered // 2 :]}
    assert outcome.usage.counts.recomputed == delivered + delivered // 2
    assert outcome.usage.counts.computed == 50


def test_choices_are_keyed_by_seed_and_position(kit: Any, model: Any) -> None:
    """L5: choice 0 of n equals n = 1, choice i a request with its seed; nothing depends on the batch around them."""
    sampling = SamplingParams(temperature=1.0, top_p=0.95)
    alone = kit.request("s", 37, sampling=sampling, max_tokens=30)
    three = kit.request("s", 37, sampling=sampling, max_tokens=30, n=3)
    single = answers(kit, kit.engine(model), [alone])["s"][0]
    for rows in (200, 9):
        engine = kit.engine(model, rows=rows)
        many = answers(kit, engine, [three])["s"][0]
        assert many[0] == single[0]
        for choice in (1, 2):
            twin = replace(alone, seed=choice_seed(alone.seed, choice))
            assert many[choice] == answers(kit, kit.engine(model), [twin])["s"][0][0]
        assert len({tuple(tokens) for tokens in many.values()}) == 3
    noise = [kit.request(f"noise{i}", 20 + i) for i in range(3)]
    assert answers(kit, kit.engine(model), [*noise, three])["s"][0] == many
