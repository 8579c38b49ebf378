"""Prefill and decode as two engines give the tokens of one (L5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.messages import (
    FinishReason,
    PrefillAccepted,
    RowsReady,
    Submit,
)
from headrace.engine.sampling_params import SamplingParams


@pytest.mark.parametrize("n", [1, 3])
def test_two_engines_give_the_tokens_of_one(kit: Any, model: Any, pair: Any, n: int) -> None:
    """L5: disaggregated = one process, for every alignment of the prompt to the block."""
    sampling = SamplingParams(temperature=1.0, logprobs=2)
    for length in (1, 15, 16, 17, 40, 100):
        request = kit.request(f"h{length}", length, n=n, sampling=sampling, max_tokens=20)
        whole = kit.engine(model)
        whole.apply(Submit(request))
        expected = kit.collect(kit.run(whole))[f"h{length}"]
        got = pair.serve(request)
        assert (got.tokens, got.text) == (expected.tokens, expected.text)
        assert got.usage.counts == expected.usage.counts
        assert got.usage.completion_tokens == 20 * n
    pair.assert_idle()


def test_a_second_turn_sends_only_what_decode_lacks(kit: Any, model: Any, pair: Any) -> None:
    """Decode reports the leading blocks it holds; prefill hits its own prefix; usage counts it once (L27)."""
    first = pair.serve(kit.request("turn1", 50, max_tokens=30))
    second = kit.request("turn2", [*kit.request("turn1", 50).prompt_ids, *first.tokens[0], *[kit.letter] * 9])
    whole = kit.engine(model)
    whole.apply(Submit(second))
    expected = kit.collect(kit.run(whole))["turn2"]
    reserved = pair.reserve(second)
    assert reserved.held_blocks == 4
    events = pair.run_prefill(second, reserved)
    accepted = next(event for event in events if isinstance(event, PrefillAccepted))
    assert accepted.cached == 48
    named = [entry.block for event in events if isinstance(event, RowsReady) for entry in event.rows]
    assert named == [4]
    pair.decode.apply(pair.push(reserved, events))
    pair.finish_prefill(events)
    got = kit.collect(kit.run(pair.decode))["turn2"]
    assert got.tokens == expected.tokens
    assert got.usage.counts.cached == 48
    pair.assert_idle()


def test_reused_rows_are_named_first_and_before_any_step(kit: Any, pair: Any) -> None:
    """Pushes: reused rows first, then each chunk's (spec/protocol.md, "The calls")."""
    pair.serve(kit.request("a", 64))
    request = kit.request("b", [*kit.request("a", 64).prompt_ids, *[kit.letter] * 40])
    reserved = replace(pair.reserve(request), held_blocks=0)
    events = pair.run_prefill(request, reserved)
    kinds = [type(event).__name__ for event in events]
    assert kinds[:2] == ["PrefillAccepted", "RowsReady"]
    assert [entry.block for entry in events[1].rows] == [0, 1, 2, 3]


def test_the_first_token_is_checked_before_any_step(kit: Any, model: Any, pair: Any) -> None:
    """Stop, EOS and max_tokens act on the first token; it is event 0 and counts."""
    one = kit.request("one", 20, max_tokens=1)
    outcome = pair.serve(one)
    assert len(outcome.tokens[0]) == 1
    assert outcome.finished[0].reason is FinishReason.LENGTH
    stopping = kit.request("one", 20, stop_token_ids=tuple(outcome.tokens[0]))
    stopping = replace(stopping, key=replace(stopping.key, request_id="two"))
    outcome = pair.serve(stopping)
    assert outcome.finished[0].reason is FinishReason.STOP
    assert (outcome.text.get(0, ""), outcome.usage.completion_tokens) == ("", 1)
    pair.assert_idle()
