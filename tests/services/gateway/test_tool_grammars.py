"""What a model may write where its calls are held, token by token, and what a client is told of it."""

from __future__ import annotations

import json

import deepseek_recipe as recipe
import pytest
from jsonschema import Draft202012Validator

from headrace.engine.text.constraint_forms import ConstraintRefused
from headrace.engine.text.structural_tags import from_structural_tag
from headrace.services.gateway.hermes import CallReader
from headrace.services.gateway.tool_grammars import in_hermes, in_v41
from headrace.services.runtime.errors import InvalidArgument
from tests.services.gateway.fakes import TOKENIZER
from tests.services.gateway.languages import (
    CITY,
    CLOCK,
    GOOD,
    WEATHER,
    D,
    Language,
    calls,
    hermes,
    invoke,
    wanted,
)


def test_hermes_calls_of_the_model() -> None:
    """Text is free; a call that is opened is one of a tool, with its arguments."""
    language = Language(in_hermes(wanted(weather=WEATHER, clock=CLOCK)))
    for good in (
        "",
        "free text, <tool, </tool_call> and {",
        hermes("weather", '{"city": "Rome", "days": 2}'),
        "Let me. " + hermes("weather", '{"city":"</tool_call>","unit":"c"}') + "\n" + hermes("clock", '{"zone": 5}'),
        hermes("clock", '{"other":[{"a b":null}]}') + " done",
        '<tool_call>{"name":"weather","arguments":{"city":"R"}}</tool_call>',
    ):
        assert language.has(good), good
    for bad in (
        hermes("weather", "{}"),
        hermes("weather", '{"city": 5}'),
        hermes("weather", '{"city": "R", "days": 0}'),
        hermes("weather", '{"city": "R", "more": 1}'),
        hermes("wether", '{"city": "R"}'),
        hermes("clock", "[]"),
        hermes("clock", '{"a b": 1}'),
        "<tool_call>but no",
        "<tool_call>",
        hermes("weather", '{"city": "R"}').removesuffix("</tool_call>"),
    ):
        assert not language.has(bad), bad
    alone = Language(in_hermes(wanted(weather=WEATHER, clock=CLOCK, one=True)))
    first = hermes("weather", '{"city": "R"}')
    assert alone.has(first)
    assert alone.has("so: " + first)
    assert not alone.has(first + first)
    several = Language(in_hermes(wanted(weather=WEATHER, clock=CLOCK, forced=True)))
    again = hermes("clock", "{}").removeprefix("<tool_call>\n")
    assert several.has(again)
    assert several.has(again + "\n" + first)
    assert not several.has(again + "\n" + hermes("weather", "{}"))
    assert not several.has(again + "so")
    forced = Language(in_hermes(wanted(weather=WEATHER, clock=CLOCK, forced=True, one=True)))
    assert forced.has('{"name": "weather", "arguments": {"city": "R"}}')
    assert forced.has('{"name": "clock", "arguments": {"zone": "UTC"}}')
    assert not forced.has('{"name": "clock", "arguments": {"zone": "utc"}}')
    assert not forced.has("free")


def test_v41_calls_of_the_model() -> None:
    """Its markup, strings as they are, behind reasoning in which nothing is called."""
    tools = {"weather": WEATHER, "clock": CLOCK}
    language = Language(in_v41(wanted(**tools), TOKENIZER, reasoning=False, opened=False))
    for good in (
        "",
        "free < text ｜DSM ｜",
        "Let me.\n\n" + calls(invoke("weather", *GOOD)),
        calls(invoke("weather", CITY, ("unit", "true", "f")), invoke("clock", ("zone", "false", "5")), invoke("clock")),
    ):
        assert language.has(good), good
    for bad in (
        calls(invoke("weather")),
        calls(invoke("weather", ("city", "false", "5"))),
        calls(invoke("weather", ("city", "false", '"Rome"'))),
        calls(invoke("weather", CITY, ("days", "false", "0"))),
        calls(invoke("weather", CITY, CITY)),
        calls(invoke("weather", CITY, ("more", "true", ""))),
        calls(invoke("wether", CITY)),
        calls(),
        invoke("weather", CITY),
        f"a {D}",
        f"<{D} cal",
        calls(invoke("weather", CITY)) + "more",
        "why</think>so",
    ):
        assert not language.has(bad), bad
    assert not language.has(TOKENIZER.encode_plain(calls(invoke("weather", CITY))))  # the marker spelt out
    alone = Language(in_v41(wanted(**tools, one=True), TOKENIZER, reasoning=False, opened=False))
    assert alone.has(calls(invoke("weather", CITY)))
    assert not alone.has(calls(invoke("weather", CITY), invoke("weather", CITY)))
    behind = Language(in_v41(wanted(**tools), TOKENIZER, reasoning=True, opened=False))
    assert behind.has("why</think>so " + calls(invoke("weather", CITY)))
    assert behind.has("</think>")
    assert not behind.has("why")
    assert not behind.has(calls(invoke("weather", CITY)) + "</think>")
    assert not behind.has("why</think>so " + calls(invoke("weather")))


def test_forced_v41_calls() -> None:
    """In the block that the prompt has opened, or behind reasoning; every tool's schema holds."""
    tools = {"weather": WEATHER, "clock": CLOCK}
    opened = Language(in_v41(wanted(**tools, forced=True), TOKENIZER, reasoning=False, opened=True))
    block = calls(invoke("clock", ("zone", "true", "UTC")), invoke("weather", *GOOD))
    assert opened.has(block.removeprefix(f"<{D} calls>\n"))
    assert not opened.has("")
    assert not opened.has("so")
    assert not opened.has(calls(invoke("clock", ("zone", "true", "utc"))).removeprefix(f"<{D} calls>\n"))
    behind = Language(in_v41(wanted(**tools, forced=True), TOKENIZER, reasoning=True, opened=False))
    assert behind.has("why\n</think>\n\n" + block)
    assert not behind.has("why\n</think>")
    assert not behind.has("why\n</think>so\n\n" + block)


def test_what_is_accepted_is_read() -> None:
    """deepseek-recipe reads of the markup what the grammar meant."""
    text = "Let me.\n\n" + calls(invoke("weather", *GOOD))
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(
            recipe.ConversationRequest(
                recipe.Conversation([recipe.UserMessage("u")], thinking_mode=False),
                recipe.ModelVersion.DeepseekV41Flash,
            ),
            "id",
            "m",
        ),
        recipe.ParsingOptions(),
    )
    answer = recipe.ChatCompletionResponse("id", "m", 0, 0, 0)
    chunks = [recipe.InferenceChunk.ready(), recipe.InferenceChunk.text(text)]
    for chunk in (*chunks, recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)):
        for event in processor.push(chunk):
            answer.accumulate(event)
    call = json.loads(answer.to_json())["choices"][0]["message"]["tool_calls"][0]["function"]
    arguments = json.loads(call["arguments"])
    Draft202012Validator(WEATHER).validate(arguments)
    assert (call["name"], arguments["city"], arguments["at"]) == ("weather", 'a "b"\n</x> {', [1.5, -2e9])


def test_what_cannot_be_enforced_is_named() -> None:
    """L13: the tool, the keyword and the reason."""
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for held in (
        in_hermes(wanted(clock=CLOCK, weather=unique)),
        in_v41(wanted(clock=CLOCK, weather=unique), TOKENIZER, reasoning=True, opened=False),
        in_v41(wanted(clock=CLOCK, weather=unique, forced=True), TOKENIZER, reasoning=False, opened=True),
    ):
        with pytest.raises(ConstraintRefused) as refused:
            from_structural_tag(held.constraint.structural_tag)
        told = held.named(InvalidArgument(str(refused.value), field="constraint.structural_tag"))
        assert told.field == "tools[0].function.parameters"
        assert told.message.startswith("cannot be enforced: uniqueItems: ")
        late = InvalidArgument("takes more than 10 s to compile", field="constraint")
        assert held.named(late).field == "tools"
        other = InvalidArgument("too many", field="stop.max_tokens")
        assert held.named(other) is other
    with pytest.raises(InvalidArgument, match=r"cannot tell 'a b'"):
        in_hermes(wanted(weather={"type": "object", "properties": {"a b": {}}}))


def read(text: str, step: int) -> str:
    reader = CallReader(frozenset({"f"}), in_call=False)
    pieces = [piece for at in range(0, len(text), step) for piece in reader.feed(text[at : at + step])]
    pieces += reader.finish()
    assert sum(piece.read for piece in pieces) == len(text)
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_hermes_arguments_stay_as_they_are(step: int) -> None:
    """What ends a call inside a string does not; numbers beyond Python's are not touched; what is no call is text."""
    number = "1" * 5000 + ".50e400"
    text = hermes("f", f'{{"a": "</tool_call>\\"", "b": {number}, "c": "\\ud800"}}')
    out = read(text, step)
    for told in ('>"</tool_call>\\""<', f">{number}<", '>"\\ud800"<'):
        assert told in out
    for no_call in (
        '{"name": "g"}',
        '{"name": ["f"]}',
        '{1: 2, "name": "f"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        "[" * 9999,
        '{"name": "f",}',
    ):
        assert "invoke" not in read(f"<tool_call>{no_call}</tool_call>", step)
    odd = '<tool_call>{don"t</tool_call> ' + hermes("f", '{"a": 1}')
    assert '{don"t</tool_call> ' in read(odd, step)
    assert "invoke" in read(odd, step)
