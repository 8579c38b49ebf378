"""Structural tags: the schemas inside become grammars of ours, which enforce them exactly or refuse them."""

from __future__ import annotations

import json
from typing import Any

from headrace.engine.text.constraint import Constraint, ConstraintRefused, Language
from headrace.engine.text.constraint_forms import MOST_GRAMMAR_BYTES, from_grammar, from_regex
from headrace.engine.text.errors import TextError
from headrace.engine.text.json_schema.compile import parameters_grammar, schema_grammar
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.strings import expression_grammar

MOST_BYTES = 256 * 1024
MOST_DEPTH = 64
MOST_REPEATS = 1000
V41 = "deepseek_v4_1_xml"
"""The style of a schema's objects as parameters of a call in V4.1's markup (json_schema/markup.py)."""
BESIDE_V41 = "json_beside_deepseek_v4_1_xml"
"""The style of JSON that stands where a call in V4.1's markup could: no string has `｜DSML｜` in it."""
_PARTS = {"element", "elements", "content", "tags", "begin", "end", "rules"}
"""Members that hold formats."""
_PLAIN = {
    *(
        "any_text",
        "any_tokens",
        "const_string",
        "dispatch",
        "exclude_token",
        "optional",
        "or",
        "plus",
        "sequence",
        "star",
    ),
    *("tag", "tags_with_separator", "token", "token_dispatch", "token_triggered_tags", "triggered_tags"),
}
"""Formats without text in another notation."""


def from_structural_tag(text: str) -> Constraint:
    """A tag as the compiler is to read it. Raises ConstraintRefused, SchemaRefused."""
    if len(text.encode()) > MOST_BYTES:
        raise ConstraintRefused(f"{len(text.encode())} bytes; at most {MOST_BYTES} are taken")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintRefused(f"it is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConstraintRefused('it must be {"type": "structural_tag", "format": {…}}, or such a format')
    node = document.get("format") if document.get("type") == "structural_tag" else document
    if not isinstance(node, dict):
        raise ConstraintRefused("it has no format")
    exact = {"type": "structural_tag", "format": _format(node, 0, "format")}
    return Constraint(Language.STRUCTURAL_TAG, json.dumps(exact, ensure_ascii=False, separators=(",", ":")))


def _format(node: Any, depth: int, path: str) -> Any:
    """Refusals begin with the path of the format that they are about: `format.elements[1].content: …`."""
    if depth > MOST_DEPTH:
        raise ConstraintRefused(f"formats are nested more than {MOST_DEPTH} deep")
    if isinstance(node, list):
        return [_format(item, depth + 1, f"{path}[{place}]") for place, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    try:
        made = _leaf(node)
    except TextError as error:
        raise ConstraintRefused(f"{path}: {error}") from None
    if made is not None:
        return made
    return {
        name: _format(value, depth + 1, f"{path}.{name}") if name in _PARTS else value for name, value in node.items()
    }


def _leaf(node: dict[str, Any]) -> dict[str, Any] | None:
    """A format in another notation; None for one that holds others. Raises TextError."""
    kind = node.get("type")
    if kind == "json_schema":
        return _schema(node)
    if kind == "grammar":
        if node.get("syntax", "ebnf") != "ebnf":
            raise ConstraintRefused("a grammar inside it must be EBNF")
        return {"type": kind, "grammar": from_grammar(str(node.get("grammar", ""))).text}
    if kind == "regex":
        return _regex(node)
    if kind == "repeat":
        if any(not isinstance(node.get(end), int) or node[end] > MOST_REPEATS for end in ("min", "max")):
            raise ConstraintRefused(f"min and max of a repeat must be numbers up to {MOST_REPEATS}")
    elif kind not in _PLAIN:
        raise ConstraintRefused(f"format {kind!r} is not served")
    return None


def _regex(node: dict[str, Any]) -> dict[str, Any]:
    """`never`, an extension, is an expression that is found in no text of the language."""
    pattern = from_regex(str(node.get("pattern", ""))).text
    never = node.get("never")
    if never is None:
        return {**node, "pattern": pattern}
    if not isinstance(never, str):
        raise ConstraintRefused("never of an expression must be one, too")
    return _grammar(expression_grammar(pattern, from_regex(never).text))


def _schema(node: dict[str, Any]) -> dict[str, Any]:
    style = node.get("style", "json")
    if style not in ("json", V41, BESIDE_V41):
        raise ConstraintRefused(f"style {style!r} of a schema is not served; its grammar would not enforce all of it")
    extra = node.keys() - {"type", "json_schema", "style", *(["dsml_token"] if style == V41 else [])}
    if extra:
        raise ConstraintRefused(f"{sorted(extra)[0]!r} of a schema is not served")
    schema = json.dumps(node.get("json_schema"))
    if style == V41:
        dsml = node.get("dsml_token")
        if not isinstance(dsml, int) or isinstance(dsml, bool) or dsml < 0:
            raise ConstraintRefused("dsml_token, the id of the token ｜DSML｜, is needed")
        grammar = parameters_grammar(schema, dsml)
    else:
        grammar = schema_grammar(schema, markup=style == BESIDE_V41)
    return _grammar(grammar)


def _grammar(grammar: str) -> dict[str, Any]:
    if len(grammar) > 16 * MOST_GRAMMAR_BYTES:
        raise SchemaRefused("its grammar is too long for a part of a structural tag")
    return {"type": "grammar", "grammar": grammar}
