"""Special tokens that a language names by id: the only ones that it may hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from headrace.engine.text.constraint import Constraint, Language

_IN_GRAMMAR = re.compile(r"\bToken\(([0-9,\s]+)\)")
_NUMBER = re.compile(r"\s*[0-9]{1,10}\s*")
"""Longer ones are no ids, and may be too long for Python; the compiler refuses them."""
MARK = b"\xff"
"""Bytes of a named token for the compiler. They begin no character, so no text of a grammar matches them: the token is
taken where it is named, and by a tag's free text, if the language has that."""


def named_tokens(constraint: Constraint) -> frozenset[int]:
    """Ids in `Token(…)` of a grammar, and in the formats of a structural tag that take tokens."""
    if constraint.language is Language.REGEX:
        return frozenset()
    if constraint.language is Language.GRAMMAR:
        return frozenset(_of_grammar(constraint.text))
    try:
        return frozenset(_of_format(json.loads(constraint.text)))
    except (ValueError, RecursionError):
        return frozenset()  # the compiler says what is wrong


def _of_grammar(text: str) -> Iterator[int]:
    for found in _IN_GRAMMAR.finditer(text):
        yield from (int(one) for one in found[1].split(",") if _NUMBER.fullmatch(one))


def _of_format(node: Any) -> Iterator[int]:
    if isinstance(node, list):
        for item in node:
            yield from _of_format(item)
    if not isinstance(node, dict):
        return
    match node.get("type"):
        case "grammar":
            yield from _of_grammar(str(node.get("grammar", "")))
        case "token":
            yield from _ids([node.get("token")])
        case "token_triggered_tags":
            yield from _ids(node.get("trigger_tokens"))
        case "token_dispatch":
            yield from _ids([rule[0] for rule in node.get("rules", ()) if isinstance(rule, list) and rule])
    for value in node.values():
        yield from _of_format(value)


def _ids(values: Any) -> Iterator[int]:
    for value in values if isinstance(values, list) else ():
        if isinstance(value, int) and not isinstance(value, bool):
            yield value
