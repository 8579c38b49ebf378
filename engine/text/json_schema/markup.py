"""The arguments of a call in the markup of DeepSeek's V4.1 instead of JSON.

Each member of the object is a parameter on a line of its own:

    <｜DSML｜ parameter name="NAME" string="true">TEXT</｜DSML｜ parameter>

A string is written as it is; any other value is compact JSON, beside `string="false"`. `｜DSML｜` is one special token.
A reader takes its spelling for the token, so no text may hold it.
"""

from __future__ import annotations

from headrace.engine.text.json_schema.alternatives import (
    ANYTHING,
    Alternative,
    Conjunction,
    Literal,
    Object,
    String,
)
from headrace.engine.text.json_schema.ebnf import COMMON, quoted, text_without
from headrace.engine.text.json_schema.emit import Emitter, Form, Valueless
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.expand import Expander
from headrace.engine.text.json_schema.productive import Productive
from headrace.engine.text.json_schema.strings import Spelling, string_rule
from headrace.engine.text.json_schema.values import Json

DSML = "｜DSML｜"
"""The token's spelling."""
_REST = r'rest_of_string ::= "\"" | [^"\\\u0000-\u001f\ud800-\udfff] rest_of_string | escaped rest_of_string' + "\n"
_PLAIN = r'"\\\u0000-\u001f\ud800-\udfff'
_NO_JSON = r"\ud800-\udfff"
_COMMON = COMMON.replace(_REST, text_without(DSML, "rest_of_string", '"\\""', _PLAIN, "escaped"))
_EMPTY = '"\\n"?'
"""DeepSeek's encoding writes a call without parameters with an empty line."""
INSIDE = Spelling(plain=rf"[^{_PLAIN}\uff5c]", never=DSML, common=_COMMON)
"""Strings inside arrays and objects, and those of JSON that stands where a call could."""
_RAW = Spelling(
    opening="",
    closing="end_of_value",
    any="raw",
    rest="raw",
    plain=rf"[^{_NO_JSON}\uff5c]",
    escaped=frozenset(),
    never=DSML,
)


class Parameters:
    """Writes the grammar of one tool's parameters. Raises SchemaRefused for what no grammar can enforce."""

    def __init__(self, expander: Expander, productive: Productive, dsml: int) -> None:
        """`dsml`: the token's id."""
        self._emitter = Emitter(expander, productive, INSIDE)
        self._productive = productive
        self._dsml = dsml
        self._form = Form("", "", "", _EMPTY, self._member)
        self._values: dict[Conjunction, str] = {}

    def text(self, root: Conjunction) -> str:
        """The grammar of the objects that satisfy the root; other values are no arguments. Raises Valueless."""
        there = [one for one in map(self._arguments, self._productive.alternatives(root)) if one is not None]
        if not there:
            raise Valueless(root)
        return (
            self._emitter.rules.text(" | ".join(dict.fromkeys(there)))
            + f'dsml ::= Token({self._dsml})\nend_of_value ::= "</" dsml " parameter>\\n"\n'
            + text_without(DSML, "raw", "end_of_value", _NO_JSON)
        )

    def _arguments(self, one: Alternative) -> str | None:
        if isinstance(one, Object):
            return self._emitter.object(one, self._form)
        if isinstance(one, Literal) and isinstance(one.value, dict):
            members = [
                self._parameter(self._emitter.name(name), self._literal(item)) for name, item in one.value.items()
            ]
            return " ".join(members) or _EMPTY
        return None

    def _member(self, name: str, numbers: Conjunction) -> str:
        rule = self._values.get(numbers)
        if rule is None:
            rule = self._values[numbers] = self._emitter.rules.name("p")
            self._emitter.rules.set(rule, self._value(numbers))
        return self._parameter(name, rule)

    @staticmethod
    def _parameter(name: str, value: str) -> str:
        return f'"<" dsml " parameter name=" {name} " string=\\"" {value}'

    def _value(self, numbers: Conjunction) -> list[str]:
        """What follows `string="`. Raises Valueless."""
        if numbers == ANYTHING:
            other = '(any_object | any_array | any_number | "true" | "false" | "null")'
            return ['"true\\">" raw', f'"false\\">" {other} end_of_value']
        out: list[str] = []
        for one in self._productive.alternatives(numbers):
            if isinstance(one, String):
                text = string_rule(one, self._emitter.rules, spelling=_RAW)
                out += [] if text is None else [f'"true\\">" {text}']
            elif isinstance(one, Literal):
                out.append(self._literal(one.value))
            else:
                written = self._emitter.alternative(one)
                out += [] if written is None else [f'"false\\">" ({written}) end_of_value']
        if not out:
            raise Valueless(numbers)
        return out

    def _literal(self, value: Json) -> str:
        if isinstance(value, str):
            if DSML in value:
                raise SchemaRefused(f"a text with {DSML!r} cannot be written in a call")
            return f'"true\\">" {quoted(value)} end_of_value'
        return f'"false\\">" {self._emitter.literal(value)} end_of_value'
