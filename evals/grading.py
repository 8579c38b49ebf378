"""Grading by rule: a pure function of an item and a text. The judge's rule reads a verdict that somebody has given."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from headrace.evals import constraints, extract
from headrace.evals.errors import EvalError
from headrace.evals.items import Item

REVISION = 1
"""Counts changes that may change a grade; stands in every grade."""


@dataclass(frozen=True)
class Grade:
    """What a text is worth."""

    correct: bool
    extracted: str = ""
    """The answer that was found in the text; empty: none."""
    note: str = ""
    """Why it is wrong, where the rule can tell."""


def grade(item: Item, text: str, *, thinking: bool = False) -> Grade:
    """Grade by the item's rule; `thinking` says that the prompt has opened the model's thoughts.

    Raises EvalError for a reference that does not fit the rule, and for items that need a judge.
    """
    final = extract.final_part(text, thinking=thinking)
    match item.rule:
        case "boxed_integer":
            found = extract.boxed_integer(final)
            return _compared(None if found is None else str(found), str(_reference_integer(item)))
        case "letter":
            return _compared(extract.letter(final), item.answer)
        case "number":
            return _number(item, final)
        case "exact":
            said = extract.said(final)
            return Grade(extract.normalised(said) == extract.normalised(item.answer), said)
        case "json":
            return _json(item, final)
        case "checks":
            missed = constraints.broken(final, item.checks)
            return Grade(not missed, final[:200], "breaks " + ", ".join(missed) if missed else "")
        case "judge":
            raise EvalError(f"item {item.identifier!r} needs a judge")


def _compared(found: str | None, wanted: str) -> Grade:
    return Grade(False, note="no answer found") if found is None else Grade(found == wanted, found)


def _reference_integer(item: Item) -> int:
    value = extract.parse_integer(item.answer)
    if value is None:
        raise EvalError(f"item {item.identifier!r}: {item.answer!r} is no integer")
    return value


def _number(item: Item, text: str) -> Grade:
    wanted = extract.parse_number(item.answer)
    if wanted is None:
        raise EvalError(f"item {item.identifier!r}: {item.answer!r} is no number")
    found = extract.number(text)
    return Grade(False, note="no answer found") if found is None else Grade(found == wanted, _short(found))


def _short(value: Fraction) -> str:
    return str(value) if value.denominator == 1 or value.denominator > 10**6 else f"{float(value):.10g}"


def _json(item: Item, text: str) -> Grade:
    found = extract.json_object(text)
    if found is None:
        return Grade(False, note="no answer found")
    wanted = json.loads(item.answer)
    try:
        shown = json.dumps(found, ensure_ascii=False, sort_keys=True)
    except RecursionError:
        return Grade(False, note="nested too deeply")
    wrong = [name for name in sorted({*wanted, *found}) if not same(wanted.get(name, _NONE), found.get(name, _NONE))]
    return Grade(not wrong, shown, "wrong: " + ", ".join(wrong) if wrong else "")


_NONE = object()


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0 but not true; texts but for case and outer spaces."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, str) and isinstance(other, str):
        return one.strip().casefold() == other.strip().casefold()
    return bool(one == other)
