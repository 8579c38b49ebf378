# ruff: noqa: E501 - tables read better with a case a line
"""Schemas become grammars of exactly their instances, or are refused. Judged through xgrammar, as generations are."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from headrace.engine.text.json_schema.compile import schema_grammar
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.order import SchemaOrder

BYTES = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(256)], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[0]
)
COMPILER = xgrammar.GrammarCompiler(BYTES, cache_enabled=False)


class Language:
    """The texts that a schema's grammar accepts."""

    def __init__(self, schema: object, *, formats: bool = False) -> None:
        text = json.dumps(schema)
        self._compiled = COMPILER.compile_grammar(xgrammar.Grammar.from_ebnf(schema_grammar(text, formats=formats)))
        self._order = SchemaOrder(text, formats=formats)

    def text(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled, terminate_without_stop_token=True)
        return bool(matcher.accept_string(text) and matcher.is_terminated())

    def value(self, value: Any) -> bool:
        return self.text(json.dumps(self._order.of(value), ensure_ascii=False, separators=(",", ":")))


CASES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer", "minimum": 5, "exclusiveMaximum": 120}, [5, 9, 10, 99, 119, 7.0], [4, 120, 1000, -6, 5.5, "5"]),
    ({"type": "number", "minimum": -1.5, "maximum": 2.25}, [-1.5, -1, 0, 2.25, 2.2, 0.001], [-1.51, 2.26, 3, -20]),
    ({"exclusiveMinimum": 0.5}, [0.51, 1, 10, "x", None], [0.5, 0.49, 0, -1]),
    ({"multipleOf": 0.25}, [0.25, 4.5, 19.75, 3, -0.25], [0.2, 4.025]),
    ({"type": "integer", "multipleOf": 7, "minimum": 100}, [105, 700, 112.0], [7, 98, 106, 701]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü", "😀b", 'a"'], ["a", "abcd", ""]),
    ({"pattern": "^a+$"}, ["a", "aaa", 1, []], ["b", "ab", ""]),
    ({"pattern": "b"}, ["abc", "b"], ["ac", ""]),
    ({"type": "string", "pattern": "^[A-Z]{2}-\\d+$", "maxLength": 5}, ["AB-1", "AB-12"], ["AB-", "AB-123", "ab-1"]),
    ({"type": "string", "not": {"enum": ["no", 'a"b']}}, ["yes", "noo", "n", ""], ["no", 'a"b']),
    ({"type": ["string", "null"]}, ["x", None], [1, True, [], {}]),
    ({"enum": [1, "1", True, None, [1, {"a": 2}]]}, [1, 1.0, "1", True, None, [1, {"a": 2}]], [2, False, [1], "true"]),
    ({"const": {"a": [1, 2]}}, [{"a": [1, 2]}], [{"a": [1]}, {}, {"a": [1, 2], "b": 1}]),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"], "additionalProperties": False},
        [{"a": 1}, {"a": 1, "b": [None]}],
        [{}, {"b": 1}, {"a": "x"}, {"a": 1, "c": 1}],
    ),
    ({"properties": {"a": {"type": "integer"}, "ab": False}}, [{}, {"a": 1, "b": "x", "abc": 1}, 3], [{"a": "x"}, {"ab": 1}]),
    ({"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2}, [{}, {"x": True, "y": False}], [{"x": 1}, {"x": True, "y": True, "z": True}]),
    ({"type": "object", "patternProperties": {"^n_": {"type": "number"}}, "additionalProperties": {"type": "string"}}, [{"n_a": 1, "s": "x"}, {}], [{"n_a": "x"}, {"s": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "minProperties": 1}, [{"a": 1}], [{}, {"A": 1}, {"a": 1, "B": 2}]),
    ({"required": ["q"], "properties": {"p": True}}, [{"q": 1}, {"p": 1, "q": 2}, "x"], [{}, {"p": 1}]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}, [[1], [1, 2, 3]], [[], [1, 2, 3, 4], ["x"]]),
    ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False}, [[], ["x"], ["x", 1]], [[1], ["x", 1, 2]]),
    ({"type": "array", "contains": {"const": 3}, "minContains": 2}, [[3, 3], [1, 3, "x", 3]], [[], [3], [1, 2]]),
    ({"type": "array", "maxItems": 1, "uniqueItems": True}, [[], [1]], [[1, 1], [1, 2]]),
    ({"allOf": [{"properties": {"b": {"minimum": 2}}}, {"properties": {"b": {"maximum": 3}}, "required": ["b"]}]}, [{"b": 2}, {"b": 3, "c": 0}], [{"b": 1}, {"b": 4}, {}]),
    ({"anyOf": [{"type": "integer"}, {"minLength": 2, "type": "string"}]}, [1, "ab"], [1.5, "a"]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}], "type": "number"}, [1, 2.5, -3], [2, 3, 1.5]),
    (
        {"oneOf": [{"properties": {"kind": {"const": k}, k: {"type": "integer"}}, "required": ["kind", k], "type": "object", "additionalProperties": False} for k in ("x", "y")]},
        [{"kind": "x", "x": 1}, {"kind": "y", "y": 2}],
        [{"kind": "x", "y": 1}, {"kind": "z"}, {"kind": "x", "x": "1"}],
    ),
    (
        {"type": "object", "properties": {"c": {"enum": ["de", "us"]}, "zip": {"type": "string"}}, "required": ["c", "zip"], "if": {"properties": {"c": {"const": "de"}}}, "then": {"properties": {"zip": {"pattern": "^\\d{5}$"}}}, "else": {"properties": {"zip": {"minLength": 1}}}},
        [{"c": "de", "zip": "10115"}, {"c": "us", "zip": "x"}],
        [{"c": "de", "zip": "x"}, {"c": "us", "zip": ""}],
    ),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 2}, {"b": 1}, {}], [{"a": 1}]),
    ({"not": {"type": ["string", "object"]}}, [1, None, []], ["x", {}]),
    ({"not": {"multipleOf": 3}, "type": "integer"}, [1, 2, 4, 100], [3, 0, 99]),
    ({"$defs": {"n": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": False}}, "$ref": "#/$defs/n"}, [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": None}}], [{"v": 1}, {"v": 1, "next": {"v": 2}}]),
    ({"properties": {"a": True}, "allOf": [{"properties": {"b": {"type": "integer"}}}], "unevaluatedProperties": False, "type": "object"}, [{"a": 1, "b": 2}, {}], [{"c": 1}, {"b": "x"}]),
    ({"anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"b": {"const": 2}}, "required": ["b"]}], "unevaluatedProperties": False}, [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}], [{}, {"a": 1, "c": 1}, {"a": 1, "b": 3}]),
    ({"prefixItems": [True], "anyOf": [{"prefixItems": [True, {"const": 2}]}, True], "unevaluatedItems": False}, [[1], [1, 2], []], [[1, 3], [1, 2, 3]]),
    # An alternative whose parts cannot be had together, and what would need it.
    ({"$defs": {"x": {"type": "array", "items": False, "contains": True}}, "anyOf": [{"$ref": "#/$defs/x"}, {"type": "object", "required": ["k"], "properties": {"k": {"$ref": "#/$defs/x"}}}, {"type": "null"}]}, [None], [[], [1], {"k": []}, {"k": [1]}]),
    (True, [1, "x", [{}], {"a": None}, 1e300, -1.5e-7], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=[json.dumps(case[0])[:70] for case in CASES])
def test_exactly_the_instances(schema: Any, good: list[Any], bad: list[Any]) -> None:
    language = Language(schema)
    validator = Draft202012Validator(schema)
    for value in good:
        assert validator.is_valid(value), "the test itself is wrong"
        assert language.value(value), value
    for value in bad:
        assert not validator.is_valid(value), "the test itself is wrong"
        assert not language.value(value), value


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "no JSON"),
        ("[]", "an object, true or false"),
        ('{"type": "strin"}', "wrong at type"),
        ('{"minLength": -1}', "wrong at minLength"),
        ('{"$schema": "http://json-schema.org/draft-07/schema#"}', "2020-12"),
        ('{"uniqueItems": true}', "uniqueItems"),
        ('{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ('{"type": "string", "pattern": "(a)\\\\1"}', "uses"),
        ('{"$ref": "other.json"}', "not fetched"),
        ('{"$ref": "#"}', "refers to itself"),
        ('{"x": {"minLength": "1"}, "$ref": "#/x"}', "what '#/x' names is wrong at minLength"),
        ('{"x": {"pattern": "(?<a"}, "$ref": "#/x"}', "what '#/x' names is wrong at pattern"),
        ('{"type": "string", "enum": [1]}', "no value"),
        ('{"items": false, "not": {"items": false}}', "no value"),
        ('{"oneOf": [true, {"items": false}], "items": false}', "no value"),
        ('{"$defs": {"a": {"type": "object", "required": ["x"], "properties": {"x": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"}', "no value"),
        ('{"type": "array", "contains": true, "maxContains": 3}', "maxContains"),
        ('{"not": {"patternProperties": {"a": false}}}', "patternProperties"),
        ('{"type": "number", "multipleOf": 0.00001}', None),
        ('{"type": "number", "multipleOf": 123456789}', "multipleOf"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(schema: str, words: str | None) -> None:
    """L13: a bad schema is the request's fault and says why."""
    if words is None:
        schema_grammar(schema)
        return
    with pytest.raises(SchemaRefused, match=words):
        schema_grammar(schema)


def test_formats_are_annotations_unless_asserted() -> None:
    schema = {"type": "string", "format": "date"}
    assert Language(schema).value("yesterday")
    strict = Language(schema, formats=True)
    assert strict.value("2024-02-29")
    assert not strict.value("2023-02-29")
    assert not strict.value("yesterday")
    with pytest.raises(SchemaRefused, match="cannot be enforced"):
        schema_grammar('{"type": "string", "format": "iri"}', formats=True)


def test_one_space_may_follow_commas_and_colons() -> None:
    language = Language({"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]})
    assert language.text('{"a": [1, 2]}')
    assert language.text('{"a":[1,2]}')
    assert not language.text('{"a":  [1]}')
    assert not language.text('{ "a":[1]}')


def test_single_values_are_taken_out() -> None:
    """Of strings; a single number or list no grammar can take out of all of them."""
    language = Language({"not": {"enum": ["b", True, None]}, "type": ["string", "boolean", "null"]})
    assert [value for value in ("a", "b", True, False, None) if language.value(value)] == ["a", False]
    with pytest.raises(SchemaRefused, match="a single array"):
        schema_grammar('{"not": {"enum": ["b", {}, [1]]}}')


def test_names_come_in_the_order_of_the_schema() -> None:
    language = Language({"properties": {"b": True, "a": True}, "required": ["z"]})
    assert language.text('{"b":1,"a":2,"z":3,"q":4}')
    assert not language.text('{"a":2,"b":1,"z":3}')
    order = SchemaOrder('{"properties":{"b":true,"a":true},"required":["z"]}')
    assert list(order.of({"q": 4, "z": 3, "a": 2, "b": 1})) == ["b", "a", "z", "q"]  # type: ignore[arg-type]


NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 10, 15, 100, 0.5, -0.25, 1.75, 2.0, 99.9])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "a", "ab", "abc", "b", "1", 'q"\\\n', "é"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)),
    max_leaves=6,
)
LIMITS = st.sampled_from([0, 1, 2, 3])


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    names = st.sampled_from("abcd")
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"]),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "minimum": NUMBERS,
        "maximum": NUMBERS,
        "exclusiveMinimum": NUMBERS,
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.25]),
        "minLength": LIMITS,
        "maxLength": LIMITS,
        "pattern": st.sampled_from(["^a", "b$", "a|b", "^[a-c]+$", "^.$", "\\d"]),
        "minItems": LIMITS,
        "maxItems": LIMITS,
        "items": inner,
        "prefixItems": some,
        "contains": inner,
        "properties": st.dictionaries(names, inner, max_size=3),
        "required": st.lists(names, max_size=2, unique=True),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(st.sampled_from(["a", "^b", "[cd]"]), inner, max_size=2),
        "propertyNames": inner,
        "maxProperties": LIMITS,
        "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2, unique=True), max_size=2),
        "allOf": some,
        "anyOf": some,
        "oneOf": some,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
    }
    return st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen})
    )


SCHEMAS = st.recursive(st.one_of(st.booleans(), _schemas(st.booleans())), _schemas, max_leaves=6)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(schema=SCHEMAS, values=st.lists(VALUES, min_size=8, max_size=16))
def test_the_grammar_is_the_schema(schema: Any, values: list[Any]) -> None:
    """Whatever schema is not refused accepts exactly what `jsonschema` says, value by value."""
    try:
        language = Language(schema)
    except SchemaRefused:
        return
    validator = Draft202012Validator(schema)
    for value in values:
        assert language.value(value) == validator.is_valid(value), value


def test_schemas_keep_decimals() -> None:
    """0.1 is a tenth, not the float beside it."""
    language = Language({"type": "number", "minimum": 0.1, "maximum": 0.3, "multipleOf": 0.1})
    assert [Decimal(text) for text in ("0.1", "0.2", "0.3", "0.4") if language.text(text)] == [
        Decimal("0.1"),
        Decimal("0.2"),
        Decimal("0.3"),
    ]
