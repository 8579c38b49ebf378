"""services.router.constraint: what a client writes becomes what workers compile, or is refused with the reason."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.services.router.constraint import Constraints, constrained
from headrace.services.router.prepare import prepare
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.errors import InvalidArgument
from headrace.v1 import common_pb2, inference_pb2
from tests.services.router.test_prepare import LIMITS, MODEL, TOKENIZER, text

SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}}}'
TAG = (
    '{"type":"structural_tag","format":{"type":"tag","begin":"<f>","content":{"type":"json_schema","json_schema":'
    + SCHEMA
    + '},"end":"</f>"}}'
)
END = TOKENIZER.specials["</think>"]


def made(constraint: common_pb2.Constraint, **fields: object) -> common_pb2.Constraint:
    request = text(constraint=constraint, **fields)
    found = constrained(prepare(request, MODEL, LIMITS), request, MODEL, LIMITS).constraint
    assert found is not None
    return found


def test_schemas_objects_and_choices_become_grammars() -> None:
    """Workers compile three forms, all exact."""
    assert made(common_pb2.Constraint(json_schema=SCHEMA)).grammar.startswith("root ::=")
    assert made(common_pb2.Constraint(json_object=True)).grammar.startswith("root ::=")
    choices = common_pb2.ConstraintChoices(values=["yes", 'no"'])
    assert made(common_pb2.Constraint(choices=choices)).grammar == 'root ::= "yes" | "no\\""'
    assert made(common_pb2.Constraint(regex="a$|^b")).regex == "a$|^b"
    assert made(common_pb2.Constraint(grammar="root ::= [a-z]")).grammar == "root ::= [a-z]"
    tag = made(common_pb2.Constraint(structural_tag=TAG)).structural_tag
    assert '"grammar":"root ::=' in tag
    assert "json_schema" not in tag


def test_the_mark_behind_which_a_language_begins() -> None:
    """The model's own token, unless the prompt has ended the reasoning."""
    assert list(made(common_pb2.Constraint(regex="a", after_token_ids=[3, 4])).after_token_ids) == [3, 4]
    assert list(made(common_pb2.Constraint(regex="a", after_reasoning=True)).after_token_ids) == [END]
    message = inference_pb2.ChatMessage(
        role=inference_pb2.CHAT_ROLE_USER, content=[inference_pb2.ContentPart(text="hello")]
    )
    for thinking, after in ((True, [END]), (False, [])):
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=[message], thinking=thinking)),
            constraint=common_pb2.Constraint(regex="a", after_reasoning=True),
        )
        found = constrained(prepare(request, MODEL, LIMITS), request, MODEL, LIMITS).constraint
        assert found is not None
        assert list(found.after_token_ids) == after


@pytest.mark.parametrize(
    ("constraint", "field", "told"),
    [
        (common_pb2.Constraint(), "constraint", "no language"),
        (common_pb2.Constraint(json_object=False), "constraint.json_object", "true"),
        (common_pb2.Constraint(json_schema="{"), "constraint.json_schema", "(?i)json"),
        (common_pb2.Constraint(json_schema='{"uniqueItems":true}'), "constraint.json_schema", "uniqueItems"),
        (common_pb2.Constraint(regex="a^b"), "constraint.regex", "anchor"),
        (common_pb2.Constraint(regex="(^a|b)"), "constraint.regex", "anchor"),
        (common_pb2.Constraint(regex="a" * 5000), "constraint.regex", "4096"),
        (common_pb2.Constraint(grammar=" "), "constraint.grammar", "empty"),
        (common_pb2.Constraint(choices=common_pb2.ConstraintChoices(values=[""])), "constraint.choices", "empty"),
        (common_pb2.Constraint(structural_tag='{"type":"magic"}'), "constraint.structural_tag", "magic"),
        (
            common_pb2.Constraint(structural_tag=TAG.replace("integer", 'array","uniqueItems":true,"x":"')),
            "constraint.structural_tag",
            "uniqueItems",
        ),
        (common_pb2.Constraint(regex="a", after_token_ids=[99999]), "constraint.after_token_ids", "vocabulary"),
        (common_pb2.Constraint(regex="a", after_token_ids=[3] * 65), "constraint.after_token_ids", "64"),
        (
            common_pb2.Constraint(regex="a", after_token_ids=[3], after_reasoning=True),
            "constraint.after_reasoning",
            "one of them",
        ),
    ],
)
def test_refusals_name_field_and_reason(constraint: common_pb2.Constraint, field: str, told: str) -> None:
    """L10: before anything is reserved."""
    with pytest.raises(InvalidArgument, match=told) as caught:
        made(constraint)
    assert caught.value.field == field


def test_an_end_is_needed() -> None:
    """A language without its end, or a model without text, is refused."""
    with pytest.raises(InvalidArgument) as caught:
        made(common_pb2.Constraint(regex="a"), stop=common_pb2.StopParams(ignore_eos=True))
    assert caught.value.field == "stop.ignore_eos"
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=[5])),
        constraint=common_pb2.Constraint(regex="a"),
    )
    bare = replace(MODEL, text=None)
    with pytest.raises(InvalidArgument, match="tokenizer"):
        constrained(prepare(request, bare, LIMITS), request, bare, LIMITS)


async def test_a_router_translates_in_a_process_of_its_own() -> None:
    """L13: many at once, each once; refusals are remembered; what a client that leaves had asked for is kept."""
    constraints = Constraints(MODEL, LIMITS, SystemClock())
    good = text(constraint=common_pb2.Constraint(json_schema=SCHEMA))
    bad = text(constraint=common_pb2.Constraint(json_schema='{"uniqueItems":true}'))
    prepared = prepare(good, MODEL, LIMITS)
    try:
        gone = asyncio.ensure_future(constraints.complete(prepared, good))
        await asyncio.sleep(0)
        gone.cancel()
        several = await asyncio.gather(*(constraints.complete(prepared, good) for _ in range(3)))
        assert [each.constraint for each in several] == [constrained(prepared, good, MODEL, LIMITS).constraint] * 3
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="uniqueItems") as caught:
                await constraints.complete(prepared, bad)
            assert caught.value.field == "constraint.json_schema"
        assert await constraints.complete(prepared, text()) is prepared
    finally:
        constraints.close()
