"""Compiling in a process that is killed; the cache before it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.isolated import Isolated
from headrace.engine.masks.grammars import REFUSAL_S, Grammars
from headrace.engine.masks.library import xgrammar
from headrace.engine.settings import EngineSettings
from headrace.engine.text.constraint import Constraint, ConstraintRefused, Language
from headrace.engine.text.constraint_forms import from_grammar, from_regex
from headrace.engine.text.structural_tags import from_structural_tag


def refusal(grammars: Grammars, constraint: Constraint) -> str:
    with pytest.raises(EngineError) as caught:
        grammars.get(constraint)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    return caught.value.message


def test_reasons_are_told_and_remembered(grammars: Grammars) -> None:
    """A language that is wrong is refused with the reason, the second time without compiling it."""
    assert "Lookahead" in refusal(grammars, from_regex("(?=a)a"))
    assert '"foo" is not defined' in refusal(grammars, from_grammar("root ::= foo"))
    before = grammars.compiled
    assert "Lookahead" in refusal(grammars, from_regex("(?=a)a"))
    assert grammars.compiled == before
    for bad in ("root ::= (", "", 'start ::= "a"', 'root ::= "a" ::='):
        if bad:
            refusal(grammars, Constraint(Language.GRAMMAR, bad))


def test_structural_tags_compile(grammars: Grammars) -> None:
    """Schemas inside them are grammars of ours, several in one tag."""
    schemas = {"f": {"type": "object", "properties": {"a": {"type": "integer"}}}, "g": {"type": "string"}}
    calls = [
        {"type": "tag", "begin": f"<{name}>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</c>"}
        for name, schema in schemas.items()
    ]
    tag = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<"], "tags": calls}}
    grammar = grammars.get(from_structural_tag(json.dumps(tag)))
    for text, good in (('so <f>{"a":1}</c> and <g>"x"</c>', True), ('<f>{"a":"x"}</c>', False), ("<g>1</c>", False)):
        matcher = xgrammar.GrammarMatcher(grammar.compiled)
        assert matcher.accept_string(text) is good


def test_a_language_holds_the_special_tokens_that_it_names(kit: Any, grammars: Grammars) -> None:
    """Where it names them, and no others; a language that names none has none."""
    specials = [token for token in range(kit.tokenizer.size) if kit.tokenizer.is_special(token) and token != kit.eos]
    named, other = specials[:2]
    letter = kit.tokenizer.encode_plain("a")[0]
    parts = [{"type": "grammar", "grammar": 'root ::= [^b] root | "b"'}, {"type": "token", "token": named}]
    style = {"style": "deepseek_v4_1_xml", "dsml_token": named}
    schema = {"type": "json_schema", "json_schema": {"properties": {"a": {"type": "integer"}}}, **style}
    for constraint, good in (
        (from_grammar(f'root ::= "a" Token({named}) "a"'), True),
        (from_structural_tag(json.dumps({"type": "sequence", "elements": [parts[1]]})), False),
        (from_structural_tag(json.dumps({"type": "sequence", "elements": parts})), False),
        (from_grammar('root ::= [^b]* "b"'), False),
    ):
        compiled = grammars.get(constraint).compiled
        for token in (named, other):
            matcher = xgrammar.GrammarMatcher(compiled)
            assert all(map(matcher.accept_token, (letter, token, letter))) is (good and token == named)
    matcher = xgrammar.GrammarMatcher(grammars.get(from_structural_tag(json.dumps(schema))).compiled)
    spelled = ' parameter name="a" string="false">12</'
    text = [*kit.tokenizer.encode_plain("<"), named, *kit.tokenizer.encode_plain(spelled), named]
    assert all(map(matcher.accept_token, [*text, *kit.tokenizer.encode_plain(" parameter>\n"), kit.eos]))
    many = " ".join(f"Token({token})" for token in specials)
    assert len(specials) <= 16 or "special tokens" in refusal(grammars, from_grammar(f"root ::= {many}"))


def test_what_is_no_id_names_nothing(grammars: Grammars) -> None:
    """L13: numbers longer than Python reads are refused as the language's fault."""
    for number in ("9" * 5000, "99999999999", "1 2"):
        refusal(grammars, Constraint(Language.GRAMMAR, f"root ::= Token({number})"))


def test_a_refused_part_of_a_tag_is_named() -> None:
    """By its path."""
    part: Any = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
    tag = {"type": "tag", "begin": "<", "content": {"type": "sequence", "elements": [part]}, "end": ">"}
    for form, path in ((part, "format"), (tag, r"format\.content\.elements\[0\]")):
        with pytest.raises(ConstraintRefused, match=rf"^{path}: uniqueItems: "):
            from_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
    with pytest.raises(ConstraintRefused, match="dsml_token"):
        from_structural_tag(json.dumps({**part, "style": "deepseek_v4_1_xml"}))
    with pytest.raises(ConstraintRefused, match="style 'glm_xml'"):
        from_structural_tag(json.dumps({**part, "style": "glm_xml"}))


def test_what_takes_too_long_is_killed(kit: Any, process: Isolated) -> None:
    """L13, L6: it is refused, and for a while without trying again; the next language is compiled by a new process."""
    now = [0.0]
    settings = EngineSettings(grammar_compile_s=1e-3)
    hasty = Grammars(kit.tokenizer, kit.tokenizer.size, (kit.eos,), settings, clock=lambda: now[0], process=process)
    rules = "".join(f's{place} ::= "a" s{place + 1} | "b" s{place * 7 % 3000}\n' for place in range(3000))
    endless = Constraint(Language.GRAMMAR, f'root ::= s0\n{rules}s3000 ::= ""\n')
    assert "takes more than" in refusal(hasty, endless)
    now[0] = REFUSAL_S - 1
    assert "takes more than" in refusal(hasty, endless)
    assert hasty.compiled == 1
    now[0] = REFUSAL_S + 1
    patient = Grammars(kit.tokenizer, kit.tokenizer.size, (kit.eos,), EngineSettings(), process=process)
    patient.get(from_regex("a"))


def test_the_cache_has_a_budget(kit: Any, process: Isolated) -> None:
    """Compiled languages beyond it are forgotten, the longest unused first."""
    settings = EngineSettings(grammar_cache_bytes=1, grammar_compile_s=120.0)
    grammars = Grammars(kit.tokenizer, kit.tokenizer.size, (kit.eos,), settings, process=process)
    first = grammars.get(from_regex("a"))
    assert grammars.get(from_regex("a")) is first
    grammars.get(from_regex("b"))
    assert grammars.get(from_regex("a")) is not first
    assert grammars.compiled == 3


def test_only_models_that_can_end_are_held(kit: Any) -> None:
    """No process is started for a model without a tokenizer or an end."""
    for tokenizer, stop, told in ((None, (1,), "tokenizer"), (kit.tokenizer, (), "end-of-sequence")):
        grammars = Grammars(tokenizer, kit.tokenizer.size, stop, EngineSettings())
        assert told in refusal(grammars, from_regex("a"))
        grammars.close()
