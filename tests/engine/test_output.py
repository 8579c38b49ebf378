"""What a client sees: stop conditions, hold-back, logprobs, terminal events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.messages import Cancel, FinishReason, Submit, Tokens
from headrace.engine.sampling_params import SamplingParams


@pytest.fixture
def plain(kit: Any) -> Any:
    return kit.model(slots=False)


def complete(kit: Any, model: Any, request: Any) -> Any:
    engine = kit.engine(model)
    engine.apply(Submit(request))
    events = kit.run(engine)
    assert engine.integrity(idle=True) == ()
    return kit.collect(events)["r"], events


def test_stop_strings_end_the_text_before_the_match(kit: Any, plain: Any) -> None:
    """The completing token is delivered and counted, the text ends before the match; what may begin a stop waits."""
    free, _ = complete(kit, plain, kit.request("r", 20, max_tokens=40))
    text = free.text[0]
    assert len(text) == 40
    stop = text[17:20]
    assert text.find(stop) == 17
    outcome, events = complete(kit, plain, kit.request("r", 20, max_tokens=40, stop=("never!", stop)))
    assert outcome.text[0] == text[:17]
    assert outcome.tokens[0] == free.tokens[0][:20]
    end = outcome.finished[0]
    assert (end.reason, end.stop_match, end.completion_tokens) == (FinishReason.STOP, stop, 20)
    shown = ""
    for event in events:
        if isinstance(event, Tokens):
            assert not any(shown.endswith(stop[:size]) for size in (1, 2)) or event.text
            shown += event.text
            assert stop not in shown


def test_held_text_is_shown_when_nothing_stopped(kit: Any, plain: Any) -> None:
    """LENGTH releases what was held back for a stop that never completed."""
    free, _ = complete(kit, plain, kit.request("r", 20, max_tokens=20))
    stop = free.text[0][-1] + "\0"
    outcome, _ = complete(kit, plain, kit.request("r", 20, max_tokens=20, stop=(stop,)))
    assert (outcome.text, outcome.tokens) == (free.text, free.tokens)
    assert outcome.finished[0].reason is FinishReason.LENGTH


def test_stop_ids_and_eos_count_and_are_never_text(kit: Any, plain: Any) -> None:
    """EOS counts and is never text; ignore_eos makes it a token like any other."""
    free, _ = complete(kit, plain, kit.request("r", 20, max_tokens=20))
    stop_id = free.tokens[0][6]
    first = free.tokens[0].index(stop_id)
    outcome, _ = complete(kit, plain, kit.request("r", 20, max_tokens=20, stop_token_ids=(stop_id,)))
    assert outcome.tokens[0] == free.tokens[0][: first + 1]
    assert outcome.text.get(0, "") == free.text[0][:first]
    assert (outcome.finished[0].reason, outcome.finished[0].stop_match) == (FinishReason.STOP, stop_id)
    eager = SamplingParams(temperature=0.0, logit_bias=((kit.eos, 100.0),))
    outcome, _ = complete(kit, plain, kit.request("r", 20, ignore_eos=False, sampling=eager))
    assert (outcome.tokens[0], outcome.text.get(0, "")) == ([kit.eos], "")
    assert (outcome.finished[0].reason, outcome.usage.completion_tokens) == (FinishReason.STOP, 1)
    outcome, _ = complete(kit, plain, kit.request("r", 20, max_tokens=3, sampling=eager))
    assert outcome.tokens[0] == [kit.eos] * 3
    assert outcome.finished[0].reason is FinishReason.LENGTH


def test_min_tokens_suppresses_ends(kit: Any, plain: Any) -> None:
    """EOS and stop ids are not drawn before min_tokens are there."""
    eager = SamplingParams(temperature=0.0, logit_bias=((kit.eos, 100.0),))
    request = kit.request("r", 20, ignore_eos=False, sampling=eager, min_tokens=5)
    outcome, _ = complete(kit, plain, request)
    assert len(outcome.tokens[0]) == 6
    assert outcome.tokens[0][5] == kit.eos
    assert kit.eos not in outcome.tokens[0][:5]


def test_the_context_is_a_length_limit(kit: Any, plain: Any) -> None:
    """A request that reaches the context ends LENGTH, whatever max_tokens says."""
    outcome, _ = complete(kit, plain, kit.request("r", plain.context_tokens - 3, max_tokens=50))
    assert len(outcome.tokens[0]) == 3
    assert outcome.finished[0].reason is FinishReason.LENGTH


def test_logprobs_travel_with_their_tokens(kit: Any, plain: Any) -> None:
    """One entry per delivered token, also where tokens were held back."""
    sampling = SamplingParams(temperature=1.0, logprobs=3)
    free, _ = complete(kit, plain, kit.request("r", 20, max_tokens=20, sampling=sampling))
    stop = free.text[0][10:12]
    _, events = complete(kit, plain, kit.request("r", 20, max_tokens=20, sampling=sampling, stop=(stop,)))
    for event in events:
        if isinstance(event, Tokens):
            assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
            assert all(len(entry.top) == 3 and entry.top[0][1] >= entry.logprob for entry in event.logprobs)


def test_penalties_read_the_choice_so_far(kit: Any, plain: Any) -> None:
    """Presence penalties see this choice's output, over preemption too."""
    sampling = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    request = kit.request("r", 40, max_tokens=24, sampling=sampling)
    outcome, _ = complete(kit, plain, request)
    assert len(set(outcome.tokens[0])) > 20
    engine = kit.engine(plain, rows=7, spill_bytes=0)
    engine.apply(Submit(kit.request("older", 40, max_tokens=60)))
    engine.apply(Submit(request))
    again = kit.collect(kit.run(engine))["r"]
    assert engine.scheduler.preemptions > 0
    assert again.tokens == outcome.tokens


def test_cancel_shows_what_was_held_and_ends_once(kit: Any, plain: Any) -> None:
    """L28: every choice gets one terminal event, then one usage record, also when it never ran."""
    engine = kit.engine(plain, max_sequences=2)
    running = kit.request("running", 20, n=2, stop=("a!", "b!", "c!"))
    engine.apply(Submit(running))
    engine.apply(Submit(kit.request("waiting", 20, n=2)))
    for _ in range(3):
        engine.step()
    events = list(engine.drain_events())
    assert engine.apply(Cancel(running.key)) is True
    assert engine.apply(Cancel(replace(running.key, request_id="waiting"))) is True
    assert engine.apply(Cancel(running.key)) is False
    outcomes = kit.collect([*events, *engine.drain_events()])
    for name in ("running", "waiting"):
        reasons = [outcomes[name].finished[choice].reason for choice in (0, 1)]
        assert reasons == [FinishReason.CANCELLED] * 2
    assert len(outcomes["running"].tokens[0]) == 3
    assert engine.integrity(idle=True) == ()
    assert engine.status().conservation.cancelled == 2


def test_a_continuation_does_not_repeat_what_its_fresh_stream_holds(kit: Any, plain: Any) -> None:
    """A delivered token that the first attempt had shown, and a fresh stream still holds back, is not shown again."""
    free, _ = complete(kit, plain, kit.request("r", 20, max_tokens=20))
    text, tokens = free.text[0], free.tokens[0]
    at = next(index for index in range(5, 15) if text[index] != text[index + 1])
    request = kit.request("r", 20, max_tokens=20, stop=(text[at] + "\0", text[at + 1] + "\0"))
    _, events = complete(kit, plain, request)
    shown = [event for event in events if isinstance(event, Tokens)]
    assert any(event.offset + len(event.token_ids) == at + 1 for event in shown)
    resumed = replace(request, delivered=(tuple(tokens[: at + 1]),))
    outcome, events = complete(kit, plain, resumed)
    assert outcome.tokens[0] == tokens[at + 1 :]
    assert outcome.text[0] == text[at + 1 :]
    assert next(event for event in events if isinstance(event, Tokens)).offset == at + 1
