"""Nothing a request does ends a worker, holds memory after its end, or hurts another request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.messages import Credit, FinishReason, Submit
from headrace.engine.request import ImageInput


def test_the_guilty_request_fails_and_the_others_finish(kit: Any, model: Any) -> None:
    """L13: a step that raises is tried again one by one; innocents get the tokens they always get."""
    innocents = [kit.request(f"i{index}", 20 + index, max_tokens=20) for index in range(3)]
    alone = kit.engine(model)
    for request in innocents:
        alone.apply(Submit(request))
    expected = {name: outcome.tokens for name, outcome in kit.collect(kit.run(alone)).items()}
    engine = kit.engine(model)
    for request in innocents[:2]:
        engine.apply(Submit(request))
    for _ in range(4):
        engine.step()
    engine.apply(Submit(kit.request("bad", [kit.letter, kit.poison, kit.letter])))
    engine.apply(Submit(innocents[2]))
    outcomes = kit.collect(kit.run(engine))
    assert outcomes["bad"].finished[0].reason is FinishReason.ERROR
    assert outcomes["bad"].finished[0].error.code is ErrorCode.INTERNAL
    assert {name: outcomes[name].tokens for name in expected} == expected
    assert engine.integrity(idle=True) == ()
    conservation = engine.status().conservation
    assert (conservation.failed, conservation.finished) == (1, 3)


def test_nan_logits_are_an_error_not_a_token(kit: Any, model: Any) -> None:
    """L13 and "never a wrong answer": a row of NaN ends its request only."""
    engine = kit.engine(model)
    engine.apply(Submit(kit.request("bad", [kit.letter, kit.not_a_number])))
    engine.apply(Submit(kit.request("good", 20)))
    outcomes = kit.collect(kit.run(engine))
    assert outcomes["bad"].finished[0].reason is FinishReason.ERROR
    assert outcomes["bad"].tokens == {}
    assert outcomes["good"].finished[0].reason is FinishReason.LENGTH
    assert engine.integrity(idle=True) == ()


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("prompt_ids", (), "empty"),
        ("prompt_ids", (-1, 3), "-1"),
        ("prompt_ids", (1 << 40,), "vocabulary"),
        ("prompt_ids", (7,) * 512, "512"),
        ("max_tokens", 0, "max_tokens"),
        ("n", 0, "n is 0"),
        ("n", 99, "n is 99"),
        ("min_tokens", 9, "min_tokens"),
        ("key_root", b"short", "key_root"),
        ("seed", -1, "seed"),
        ("stop", ("",), "stop string"),
        ("stop", ("x",) * 17, "17"),
        ("stop_token_ids", (1 << 40,), "stop token"),
        ("snapshot_at", (5,), "snapshot_at"),
        ("delivered", ((1, 2),) * 2, "delivered"),
        ("delivered", ((7,) * 8,), "nothing is left"),
        ("credit", -1, "credit"),
        ("images", (ImageInput(0, 2, bytes(32)),), "image"),
        ("images", (ImageInput(0, 2, bytes(31)),), "digest"),
        ("images", (ImageInput(3, 99, bytes(32)),), "span"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_held(
    kit: Any, model: Any, field: str, value: Any, word: str
) -> None:
    """L10, L13: INVALID_ARGUMENT that names the field; nothing was accepted."""
    engine = kit.engine(model)
    request = replace(kit.request("r", 20), **{field: value})
    with pytest.raises(EngineError, match=word) as caught:
        engine.apply(Submit(request))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert engine.status().conservation.accepted == 0
    assert engine.integrity(idle=True) == ()


def test_overload_is_refused_with_a_delay(kit: Any, model: Any) -> None:
    """L12: the queue is bounded and pushes back; what can never fit is told apart."""
    engine = kit.engine(model, rows=20, max_waiting=2, max_sequences=1)
    engine.apply(Submit(kit.request("a", 20)))
    engine.step()
    engine.apply(Submit(kit.request("b", 20)))
    engine.apply(Submit(kit.request("c", 20)))
    with pytest.raises(EngineError) as caught:
        engine.apply(Submit(kit.request("d", 20)))
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert caught.value.retry_after_s == engine.settings.retry_after_s
    with pytest.raises(EngineError) as caught:
        engine.apply(Submit(kit.request("e", 300, max_tokens=100)))
    assert caught.value.code is ErrorCode.NEVER_FITS
    kit.run(engine)
    assert engine.status().conservation.accepted == 3
    assert engine.integrity(idle=True) == ()


def test_deadlines_end_running_and_waiting_requests(kit: Any, model: Any) -> None:
    """L6: the injected clock passes, both end DEADLINE, and nothing is held."""
    clock = kit.clock()
    engine = kit.engine(model, clock=clock, max_sequences=1)
    engine.apply(Submit(kit.request("running", 20, max_tokens=200, deadline=clock.now + 5)))
    engine.apply(Submit(kit.request("waiting", 20, deadline=clock.now + 5)))
    engine.apply(Submit(kit.request("patient", 20, deadline=clock.now + 50)))
    engine.step()
    assert engine.next_expiry() == clock.now + 5
    clock.now += 5
    outcomes = kit.collect(kit.run(engine))
    assert outcomes["running"].finished[0].reason is FinishReason.DEADLINE
    assert outcomes["waiting"].finished[0].reason is FinishReason.DEADLINE
    assert outcomes["patient"].finished[0].reason is FinishReason.LENGTH
    assert engine.integrity(idle=True) == ()


def test_a_slow_client_stops_only_itself(kit: Any, model: Any) -> None:
    """Credit: the request without it pauses, gives its memory to others, and goes on with the same tokens (L5)."""
    free = kit.engine(model)
    slow = kit.request("slow", 30, max_tokens=40)
    free.apply(Submit(slow))
    expected = kit.collect(kit.run(free))["slow"].tokens
    engine = kit.engine(model, rows=8)
    engine.apply(Submit(replace(slow, credit=3)))
    events = []
    for _ in range(6):
        engine.step()
        events += engine.drain_events()
    assert len(kit.collect(events)["slow"].tokens[0]) == 3
    assert not engine.step()
    engine.apply(Submit(kit.request("quick", 100, max_tokens=20)))
    while "quick" not in {event.key.request_id for event in events if type(event).__name__ == "Usage"}:
        assert engine.step()
        events += engine.drain_events()
    engine.apply(Credit(slow.key, 10))
    engine.apply(Credit(slow.key, 5))
    while engine.step():
        events += engine.drain_events()
    assert len(kit.collect(events)["slow"].tokens[0]) == 10
    engine.apply(Credit(slow.key, 1000))
    events += kit.run(engine)
    assert kit.collect(events)["slow"].tokens == expected
    assert engine.integrity(idle=True) == ()


def test_images_change_keys_and_answers(kit: Any, model: Any) -> None:
    """L2: equal ids with another picture share no prefix; an image may be split between chunks."""

    def request(name: str, digest: int, value: float) -> Any:
        image = ImageInput(10, 30, bytes([digest]) * 32, torch.full((30, model.hidden_size), value))
        ids = [*[kit.letter] * 10, *[kit.image_token] * 30, *[kit.letter + 1] * 30]
        return kit.request(name, ids, images=(image,), max_tokens=20)

    engine = kit.engine(model, max_batched_tokens=9)
    outcomes = {}
    for name, digest, value in (("one", 1, 1.0), ("two", 2, 2.0), ("again", 1, 1.0)):
        engine.apply(Submit(request(name, digest, value)))
        outcomes |= kit.collect(kit.run(engine))
    assert outcomes["one"].tokens != outcomes["two"].tokens
    assert outcomes["one"].tokens == outcomes["again"].tokens
    assert outcomes["one"].usage.counts.cached == 0
    assert outcomes["two"].usage.counts.cached == 0
    assert outcomes["again"].usage.counts.cached > 0
