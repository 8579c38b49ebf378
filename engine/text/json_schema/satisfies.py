"""Whether a value is of an alternative: for const and enum, whose values are judged before any grammar is written."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from headrace.engine.text.json_schema.alternatives import (
    Alternative,
    Alternatives,
    Array,
    Boolean,
    Conjunction,
    Literal,
    Null,
    Number,
    Object,
    String,
)
from headrace.engine.text.json_schema.formats import has_format
from headrace.engine.text.json_schema.members import members_of
from headrace.engine.text.json_schema.patterns import found_in
from headrace.engine.text.json_schema.values import Json, identity, is_number

Expand = Callable[[Conjunction], Alternatives]


def satisfies(value: Json, one: Alternative, expand: Expand) -> bool:
    """`expand` gives the alternatives of a conjunction."""
    if isinstance(one, Literal):
        return identity(value) == one.key
    excluded = getattr(one, "excluded", ())
    if any(identity(value) == gone.key for gone in excluded):
        return False
    match one:
        case Null():
            return value is None
        case Boolean():
            return isinstance(value, bool)
        case Number():
            return is_number(value) and _number(Decimal(value), one)
        case String():
            return isinstance(value, str) and _string(value, one)
        case Array():
            return isinstance(value, list) and _array(value, one, expand)
        case Object():
            return isinstance(value, dict) and _object(value, one, expand)


def _all(value: Json, numbers: Conjunction, expand: Expand) -> bool:
    return any(satisfies(value, one, expand) for one in expand(numbers))


def _number(value: Decimal, one: Number) -> bool:
    if one.low is not None and (value < one.low or (one.low_open and value == one.low)):
        return False
    if one.high is not None and (value > one.high or (one.high_open and value == one.high)):
        return False
    return all(value % step == 0 for step in one.steps) and all(value % step != 0 for step in one.not_steps)


def _string(value: str, one: String) -> bool:
    if len(value) < one.least or (one.most is not None and len(value) > one.most):
        return False
    return (
        all(found_in(pattern, value) for pattern in one.patterns)
        and not any(found_in(pattern, value) for pattern in one.not_patterns)
        and all(has_format(name, value) for name in one.formats)
    )


def _array(value: list[Json], one: Array, expand: Expand) -> bool:
    if len(value) < one.least or (one.most is not None and len(value) > one.most):
        return False
    if one.unique and len({identity(item) for item in value}) < len(value):
        return False
    for numbers, wanted in one.contains:
        if sum(_all(item, numbers, expand) for item in value) < wanted:
            return False
    return all(_all(item, one.at(place), expand) for place, item in enumerate(value))


def _object(value: dict[str, Json], one: Object, expand: Expand) -> bool:
    if len(value) < one.least or (one.most is not None and len(value) > one.most):
        return False
    if any(name not in value for name in one.required):
        return False
    if one.name_rules and not all(_all(name, one.name_rules, expand) for name in value):
        return False
    return all(_all(item, members_of(one, name), expand) for name, item in value.items())
