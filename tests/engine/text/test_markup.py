"""Parameters of calls in V4.1's markup: exactly what DeepSeek's own encoding writes for instances of the schema."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as recipe
import pytest
from jsonschema import Draft202012Validator

from headrace.engine.masks.library import xgrammar
from headrace.engine.text.json_schema.compile import parameters_grammar
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.markup import DSML
from headrace.engine.text.json_schema.order import SchemaOrder
from tests.engine.text.test_json_schema import CASES

TOKEN, END = 256, 257
"""｜DSML｜, whose bytes begin no character (engine/masks/named.py), and the end; the others are bytes."""
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(
        [*(bytes([byte]) for byte in range(256)), b"\xff", b""], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END]
    ),
    cache_enabled=False,
)


def tokens(text: str) -> list[int]:
    """Every marker as its token."""
    first, *others = (list(piece.encode()) for piece in text.split(DSML))
    return [*first, *(token for piece in others for token in (TOKEN, *piece))]


def written(arguments: dict[str, Any]) -> str:
    """As DeepSeek's encoding writes an earlier call."""
    call = recipe.ToolCall("id", "f", json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))
    turns = [recipe.UserMessage("u"), recipe.AssistantMessage("", tool_calls=[call])]
    prompt = recipe.DeepseekV41Encoding().render_conversation(recipe.Conversation(turns, thinking_mode=False)).prompt
    return prompt.split('invoke name="f">\n')[1].split(f"</{DSML} invoke>")[0]


class Arguments:
    """The language of a schema's parameters."""

    def __init__(self, schema: object) -> None:
        text = json.dumps(schema)
        self._compiled = COMPILER.compile_grammar(parameters_grammar(text, TOKEN))
        self._order = SchemaOrder(text)

    def tokens(self, ids: list[int]) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        return all(matcher.accept_token(token) for token in [*ids, END])

    def value(self, value: dict[str, Any]) -> bool:
        arguments = self._order.of(value)
        assert isinstance(arguments, dict)
        return self.tokens(tokens(written(arguments)))


def _writable(value: Any) -> bool:
    """The encoding writes numbers and the like in its own way; what matters here is the markup around them."""
    return (
        not isinstance(value, float | int)
        or isinstance(value, bool)
        or written({"v": value}).count(json.dumps(value)) == 1
    )


@pytest.mark.parametrize(("schema", "good", "bad"), [case for case in CASES if "$" not in json.dumps(case[0])])
def test_every_kind_of_value(schema: Any, good: list[Any], bad: list[Any]) -> None:
    """A parameter has the values of its schema and no other, strings as they are."""
    around = {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False}
    arguments = Arguments(around)
    for value in good:
        if _writable(value) and len(json.dumps(value)) < 200:
            assert arguments.value({"v": value}), value
    for value in bad:
        assert not arguments.value({"v": value}), value


OBJECTS = [case for case in CASES if any(isinstance(value, dict) for value in case[1])]


@pytest.mark.parametrize(("schema", "good", "bad"), OBJECTS)
def test_every_keyword_of_objects(schema: Any, good: list[Any], bad: list[Any]) -> None:
    """At the top of the parameters it means what it means in JSON."""
    arguments = Arguments(schema)
    for value in good:
        if isinstance(value, dict):
            assert Draft202012Validator(schema).is_valid(value)
            assert arguments.value(value), value
    for value in bad:
        if isinstance(value, dict):
            assert not arguments.value(value), value


def test_text_is_as_it_is() -> None:
    """Quotes, ends of lines and what looks like markup need no escape; the marker's spelling is in no text."""
    arguments = Arguments(
        {"type": "object", "properties": {"s": {}, "l": {"type": "array"}, "c": {"type": "string", "maxLength": 40}}}
    )
    for text in ("", 'a "b"\n\\n\t', "</｜DSM", "｜｜D<b>｜", "</parameter>\n", "𝄞é\x00", "DSML"):
        assert arguments.value({"s": text}), text
        assert arguments.value({"l": [text, {text: text}]}), text
        assert arguments.value({"c": text}) is ("｜" not in text), text
    spelled = list(DSML.encode())
    for before, after in (
        (' parameter name="s" string="true">a', "b"),
        (' parameter name="l" string="false">["a', 'b"]'),
    ):
        inside = [*tokens(f"<{DSML}{before}"), *spelled, *tokens(f"{after}</{DSML} parameter>\n")]
        assert not arguments.tokens(inside)
        assert arguments.tokens(tokens(f"<{DSML}{before}{after}</{DSML} parameter>\n"))
        assert not arguments.tokens([*spelled, *tokens(f"<{DSML}{before}{after}</{DSML} parameter>\n")])


def test_what_is_refused() -> None:
    """No object, an unenforced keyword, a text that cannot be written."""
    for schema, told in (
        ({"type": "string"}, "no value"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"properties": {"a": {"const": f"a{DSML}"}}}, "cannot be written"),
        ({"properties": {f"a{DSML}": {}}}, "cannot be written"),
    ):
        with pytest.raises(SchemaRefused, match=told):
            parameters_grammar(json.dumps(schema), TOKEN)
