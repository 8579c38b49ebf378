"""L5, L15: constrained choices give the same tokens by every way; each that ends with stop is in its language."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.messages import FinishReason, Submit
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.seeds import choice_seed
from headrace.engine.text.constraint import Constraint, Language
from headrace.engine.text.constraint_forms import from_choices, from_grammar, from_regex
from headrace.engine.text.structural_tags import from_structural_tag

PATTERN = "(?:[a-f]{2,9}[0-9]){1,3}"
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, presence_penalty=0.5, repetition_penalty=1.2)


def served(kit: Any, engine: Any, requests: list[Any]) -> dict[str, Any]:
    for request in requests:
        engine.apply(Submit(request))
    outcomes: dict[str, Any] = kit.collect(kit.run(engine))
    assert engine.integrity(idle=True) == ()
    return outcomes


def requests_of(kit: Any, held: Any) -> list[Any]:
    constraint = from_regex(PATTERN)
    mixed = [
        held(f"r{length}", length, constraint, sampling=DRAWN, seed=length, n=1 + length % 3) for length in (1, 16, 40)
    ]
    return [
        *mixed,
        kit.request("free", 20, max_tokens=30, sampling=DRAWN),
        held("lines", 9, from_choices(["abc", "ab", "xyz"])),
    ]


def test_batch_and_preemption_change_nothing(kit: Any, model: Any, held: Any) -> None:
    """L5, L12: alone, in a mixed batch with n > 1, chunked, and preempted for want of rows."""
    requests = requests_of(kit, held)
    alone: dict[str, Any] = {}
    for request in requests:
        alone |= served(kit, kit.engine(model, max_batched_tokens=512, prefix_reuse=False), [request])
    for name, outcome in alone.items():
        for choice, end in outcome.finished.items():
            assert end.reason in kit.done
            if name.startswith("r") and end.reason is FinishReason.STOP:
                assert re.fullmatch(PATTERN, outcome.text[choice])
                assert outcome.tokens[choice][-1] == kit.eos
    assert any(end.reason is FinishReason.STOP for end in alone["r16"].finished.values())
    assert alone["lines"].text[0] in ("abc", "ab", "xyz")
    for settings in ({}, {"max_batched_tokens": 17}, {"rows": 12, "spill_bytes": 0}):
        engine = kit.engine(model, **settings)
        together = served(kit, engine, requests)
        assert {name: outcome.tokens for name, outcome in together.items()} == {
            name: outcome.tokens for name, outcome in alone.items()
        }
    assert engine.scheduler.preemptions > 0
    assert engine.runner.masks.work.masks > 0


def a_call(kit: Any) -> Constraint:
    """A tool call between special tokens, as V4.1 has it, behind free text."""
    special = next(token for token in range(kit.tokenizer.size) if kit.tokenizer.is_special(token) and token != kit.eos)
    schema = {"properties": {"a": {"enum": ["xy", 7]}}, "required": ["a"], "maxProperties": 1}
    free = {"type": "grammar", "grammar": "root ::= [a-z]{3,4}"}
    call = {"type": "json_schema", "json_schema": schema, "style": "deepseek_v4_1_xml", "dsml_token": special}
    return from_structural_tag(json.dumps({"type": "sequence", "elements": [free, call]}))


@pytest.mark.parametrize("language", ["expression", "call"])
def test_a_continuation_goes_on_inside_its_language(kit: Any, model: Any, held: Any, language: str) -> None:
    """L15: from any number of delivered tokens on, the rest is what it would have been."""
    constraint = from_regex(PATTERN) if language == "expression" else a_call(kit)
    request = held("r", 20, constraint, sampling=DRAWN, seed=5, max_tokens=90)
    first = served(kit, kit.engine(model), [request])["r"]
    whole = first.tokens[0]
    if language == "call":
        assert first.finished[0].reason is FinishReason.STOP
        assert sum(map(kit.tokenizer.is_special, whole)) == 3
        assert re.fullmatch(
            r'[a-z]{3,4}< parameter name="a" string="(true">xy|false">7(.0)?)</ parameter>\n', first.text[0]
        )
    for count in (1, 2, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        again = replace(request, delivered=(tuple(whole[:count]),))
        outcome = kit.collect(kit.run(_submitted(kit, model, again)))["r"]
        assert outcome.tokens[0] == whole[count:] or whole[:count] + outcome.tokens[0] == whole


def _submitted(kit: Any, model: Any, request: Any) -> Any:
    engine = kit.engine(model)
    engine.apply(Submit(request))
    return engine


def test_delivered_tokens_outside_the_language_are_refused(kit: Any, model: Any, held: Any) -> None:
    """L13: what a client hands in is judged, ends its own request alone, and says why."""
    bad = held("bad", 20, from_regex("[a-c]+"), delivered=((kit.letter + 20,),))
    outcomes = served(kit, kit.engine(model), [bad, held("good", 9, from_regex("[a-c]{4}"))])
    error = outcomes["bad"].finished[0].error
    assert error is not None
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert "offset 0" in error.message
    assert re.fullmatch("[a-c]{4}", outcomes["good"].text[0])


def test_choices_are_those_of_single_requests(kit: Any, model: Any, held: Any) -> None:
    """L5: choice i of n under a constraint is what a request with its seed gives."""
    request = held("n", 33, from_regex(PATTERN), sampling=DRAWN, seed=3, n=3)
    together = served(kit, kit.engine(model), [request])["n"]
    for choice in range(3):
        single = replace(request, n=1, seed=choice_seed(3, choice))
        assert served(kit, kit.engine(model), [single])["n"].tokens[0] == together.tokens[choice]


def test_a_language_may_begin_behind_a_mark(kit: Any, model: Any, held: Any) -> None:
    """Before the mark all is free but an end; behind it the language holds."""
    free = served(kit, kit.engine(model), [kit.request("m", 20, max_tokens=60)])["m"].tokens[0]
    mark = tuple(free[3:5])
    constraint = Constraint(Language.REGEX, "[x-z]{6}", after=mark)
    outcome = served(kit, kit.engine(model), [held("m", 20, constraint)])["m"]
    tokens = outcome.tokens[0]
    assert tokens[:5] == free[:5]
    assert re.fullmatch("[x-z]{6}", outcome.text[0][5:])
    assert outcome.finished[0].reason is FinishReason.STOP
    never = Constraint(Language.REGEX, "[x-z]{6}", after=(kit.letter + 25, 3))
    outcome = served(kit, kit.engine(model), [held("m", 20, never)])["m"]
    assert outcome.finished[0].reason is FinishReason.LENGTH
    assert kit.eos not in outcome.tokens[0]


@pytest.mark.parametrize("pattern", ["ab", "a{3}|b{7}"])
def test_the_end_of_a_language_comes_before_min_tokens(kit: Any, model: Any, held: Any, pattern: str) -> None:
    """Where only an end is allowed, it is taken; where there is a choice, min_tokens decides."""
    outcome = served(kit, kit.engine(model), [held("e", 20, from_regex(pattern), min_tokens=5)])["e"]
    assert outcome.finished[0].reason is FinishReason.STOP
    assert re.fullmatch(pattern, outcome.text[0])
    longer = served(kit, kit.engine(model), [held("e", 20, from_regex("a{1,9}"), min_tokens=5)])["e"]
    assert len(longer.text[0]) >= 5


def test_logprobs_are_the_models_own(kit: Any, model: Any, held: Any) -> None:
    """Under a mask the log-probabilities stay those of the raw logits."""
    asked = SamplingParams(temperature=0.0, logprobs=2)
    request = held("l", 20, from_regex("[0-9]{3}"), sampling=asked)
    engine = _submitted(kit, model, request)
    logprobs = [entry for event in kit.run(engine) for entry in getattr(event, "logprobs", ())]
    # A digit is 30 below the letters, of which the likeliest two are told.
    assert all(entry.logprob < -25 for entry in logprobs[:3])
    assert all(kit.letter <= token < kit.letter + 26 for entry in logprobs[:3] for token, _ in entry.top)


def test_what_cannot_be_held_to_a_language_is_refused(kit: Any, model: Any, held: Any) -> None:
    """L10: before anything is reserved."""
    engine = kit.engine(model)
    for request, told in (
        (held("a", 9, from_regex("a"), ignore_eos=True), "ignore_eos"),
        (replace(held("b", 9, from_regex("a")), grammar=None), "not compiled"),
    ):
        with pytest.raises(EngineError, match=told) as caught:
            engine.apply(Submit(request))
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_a_mask_that_takes_too_long_ends_its_own_request(kit: Any, model: Any, held: Any) -> None:
    """L13: everybody in the batch waits for a mask, so its work is bounded."""
    engine = kit.engine(model, mask_limit_s=1e-9)
    outcomes = served(kit, engine, [held("slow", 9, from_grammar('root ::= "a" root | "b"')), kit.request("free", 9)])
    error = outcomes["slow"].finished[0].error
    assert error is not None
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert "a mask took" in error.message
    assert outcomes["free"].finished[0].reason is FinishReason.LENGTH
