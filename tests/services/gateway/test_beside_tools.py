"""Answers beside tools that may be called: either calls, or a text that is held to the client's format."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.text.constraint_forms import ConstraintRefused
from headrace.engine.text.structural_tags import from_structural_tag
from headrace.services.gateway.constraints import Place, answer_of, held_calls
from headrace.services.gateway.hermes import CallReader
from headrace.services.gateway.tool_grammars import Held
from headrace.services.runtime.errors import InvalidArgument, Unimplemented
from tests.services.gateway.fakes import TOKENIZER
from tests.services.gateway.languages import CITY, CLOCK, WEATHER, D, Language, calls, hermes, invoke, wanted

NOTE: Any = {
    "type": "object",
    "properties": {"note": {"type": "string"}, "kind": {"enum": ["a", "<tool_call>"]}},
    "required": ["note"],
    "additionalProperties": False,
}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"schema": NOTE}}
TOOLS: Any = {"weather": WEATHER, "clock": CLOCK}
ROME = hermes("weather", '{"city": "Rome"}')


def held(form: Any, *, v41: bool, reasons: bool = False, one: bool = False) -> Held:
    """As a request with this response_format has it; `weather` is strict, `clock` is not."""
    place = Place(v41=v41, tokenizer=TOKENIZER, opened=False, reasons=reasons)
    converted: Any = SimpleNamespace(inference_options=SimpleNamespace(output_constraint=None))
    found = held_calls(wanted(one=one, answer=answer_of(form, converted, place), **TOOLS), place)
    assert found is not None
    return found


def test_calls_or_json_with_a_template() -> None:
    """Either, and nothing beside; a text that looks like a call inside a string is a string."""
    language = Language(held(SCHEMA, v41=False))
    for good in (
        '{"note":"x"}',
        '{"note": "</tool_call>", "kind": "<tool_call>"}',
        json.dumps({"note": ROME}, ensure_ascii=False),
        ROME,
        ROME + "\n" + hermes("clock", '{"zone":5}'),
        hermes("clock", "{}"),
    ):
        assert language.has(good), good
    for bad in (
        "",
        "free text",
        '{"note":5}',
        '{"note":"x"}' + ROME,
        "Let me. " + ROME,
        ROME + '{"note":"x"}',
        hermes("weather", "{}"),
        hermes("weather", '{"city": "Rome", "more": 1}'),
        hermes("wether", '{"city": "Rome"}'),
    ):
        assert not language.has(bad), bad
    alone = Language(held(SCHEMA, v41=False, one=True))
    assert alone.has(ROME)
    assert alone.has('{"note":"x"}')
    assert not alone.has(ROME + ROME)


@pytest.mark.parametrize("reasons", [False, True])
def test_calls_or_json_in_v41(reasons: bool) -> None:
    """Behind reasoning, too, which is free; no text has what its reader takes for a call."""
    language = Language(held(SCHEMA, v41=True, reasons=reasons))
    before = "why not</think>" if reasons else ""
    block = calls(invoke("weather", CITY), invoke("clock", ("zone", "false", "5")))
    for good in ('{"note":"x｜DSM｜<"}', block, "\n\n" + block, '{"note": "<tool_call>", "kind": "<tool_call>"}'):
        assert language.has(before + good), good
    spelt = TOKENIZER.encode_trusted(before) + TOKENIZER.encode_plain('{"note":"｜DSML｜"}')
    assert not language.has(spelt)
    for bad in (
        "",
        "free",
        '{"note":5}',
        '{"note":"x"}' + block,
        "Let me.\n\n" + block,
        block + '{"note":"x"}',
        calls(invoke("weather")),
        f'{{"note":"{D}"}}',
    ):
        assert not language.has(before + bad), bad
    if reasons:
        assert not language.has('{"note":"x"}')
        assert not language.has(block + "</think>" + '{"note":"x"}')
    alone = Language(held(SCHEMA, v41=True, reasons=reasons, one=True))
    assert alone.has(before + calls(invoke("clock")))
    assert not alone.has(before + block)


def test_other_formats() -> None:
    """Any object; an expression, whose texts that read like calls are taken out; no grammar, of which none can be."""
    for v41 in (False, True):
        language = Language(held({"type": "json_object"}, v41=v41))
        assert language.has('{"any":[1]}')
        assert not language.has("[1]")
        assert language.has(calls(invoke("clock")) if v41 else hermes("clock", "{}"))
        language = Language(held({"type": "regex", "regex": "^(?:[<｜a-zA-Z_>]*|so)$"}, v41=v41))
        for good in ("so", "", "<tool_cal", "a<tool_call>", "｜DSM"):
            assert language.has(good), good
        assert language.has(TOKENIZER.encode_plain("<｜DSML｜")) is not v41
        assert language.has("<tool_call>x") is v41
        assert not language.has("so!")
        for kind in ("grammar", "structural_tag"):
            with pytest.raises(Unimplemented, match="could read like a call"):
                held({"type": kind, kind: 'root ::= "a"'}, v41=v41)


def test_what_cannot_be_enforced_is_named() -> None:
    """L13: the answer's schema or a tool's, each by the client's own name."""
    unique = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}
    never = {"type": "regex", "regex": "<tool_call>[a｜]*｜DSML｜"}
    marked = {"type": "json_schema", "json_schema": {"schema": {"const": [D]}}}
    for form, v41, reason in ((unique, False, "uniqueItems"), (unique, True, "uniqueItems"),
                              (never, False, "no text"), (never, True, "no text"), (marked, True, "DSML")):  # fmt: skip
        made = held(form, v41=v41)
        with pytest.raises(ConstraintRefused, match=reason) as refused:
            from_structural_tag(made.constraint.structural_tag)
        told = made.named(InvalidArgument(str(refused.value), field="constraint.structural_tag"))
        assert told.field == "constraint"
        assert told.message.startswith("cannot be enforced: ")
    for bad in ({"type": "regex", "pattern": "a", "never": 5}, {"type": "regex", "pattern": "a", "never": "a^b"}):
        with pytest.raises(ConstraintRefused):
            from_structural_tag(json.dumps(bad))


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_what_begins_otherwise_has_no_calls(step: int) -> None:
    """The reader tells the two apart by the first characters."""

    def read(text: str) -> str:
        reader = CallReader(frozenset({"weather"}), in_call=False, either=True)
        pieces = [piece for at in range(0, len(text), step) for piece in reader.feed(text[at : at + step])]
        return "".join(piece.text for piece in [*pieces, *reader.finish()])

    for text in (json.dumps({"note": ROME}), f"a {ROME}", "<tool_cal", "<tool_x " + ROME, ""):
        assert read(text) == text
    assert read(ROME).count("invoke name") == 1
    assert read(f"{ROME}\n{ROME}").count("invoke name") == 2
