"""Structural tags: the schemas inside become grammars of ours, which enforce them exactly or refuse them."""

from __future__ import annotations

import json
from typing import Any

from headrace.engine.text.constraint import Constraint, ConstraintRefused, Language
from headrace.engine.text.constraint_forms import MOST_GRAMMAR_BYTES, from_grammar, from_regex
from headrace.engine.text.json_schema.compile import schema_grammar
from headrace.engine.text.json_schema.errors import SchemaRefused

MOST_BYTES = 256 * 1024
MOST_DEPTH = 64
MOST_REPEATS = 1000
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
    exact = {"type": "structural_tag", "format": _format(node, 0)}
    return Constraint(Language.STRUCTURAL_TAG, json.dumps(exact, ensure_ascii=False, separators=(",", ":")))


def _format(node: Any, depth: int) -> Any:
    if depth > MOST_DEPTH:
        raise ConstraintRefused(f"formats are nested more than {MOST_DEPTH} deep")
    if isinstance(node, list):
        return [_format(item, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("type")
    if kind == "json_schema":
        return _schema(node)
    if kind == "grammar":
        if node.get("syntax", "ebnf") != "ebnf":
            raise ConstraintRefused("a grammar inside it must be EBNF")
        return {"type": kind, "grammar": from_grammar(str(node.get("grammar", ""))).text}
    if kind == "regex":
        return {**node, "pattern": from_regex(str(node.get("pattern", ""))).text}
    if kind == "repeat":
        if any(not isinstance(node.get(end), int) or node[end] > MOST_REPEATS for end in ("min", "max")):
            raise ConstraintRefused(f"min and max of a repeat must be numbers up to {MOST_REPEATS}")
    elif kind not in _PLAIN:
        raise ConstraintRefused(f"format {kind!r} is not served")
    return {name: _format(value, depth + 1) if name in _PARTS else value for name, value in node.items()}


def _schema(node: dict[str, Any]) -> dict[str, Any]:
    style = node.get("style", "json")
    if style != "json":
        raise ConstraintRefused(f"style {style!r} of a schema is not served; its grammar would not enforce all of it")
    extra = node.keys() - {"type", "json_schema", "style"}
    if extra:
        raise ConstraintRefused(f"{sorted(extra)[0]!r} of a schema is not served")
    grammar = schema_grammar(json.dumps(node.get("json_schema")))
    if len(grammar) > 16 * MOST_GRAMMAR_BYTES:
        raise SchemaRefused("its grammar is too long for a part of a structural tag")
    return {"type": "grammar", "grammar": grammar}
