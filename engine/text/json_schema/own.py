"""Keywords that look at values of one type only, and at nothing but the value's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import cast

from headrace.engine.text.json_schema.alternatives import (
    ANYTHING,
    KINDS,
    Alternative,
    Alternatives,
    Array,
    Conjunction,
    Items,
    Members,
    Number,
    Object,
    String,
)
from headrace.engine.text.json_schema.documents import Subschema
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.values import Json

Schema = dict[str, Json]
Child = Callable[[Subschema], Conjunction]


def own_alternatives(schema: Schema, child: Child, formats: bool) -> Alternatives:
    """What `type` allows, each type within the keywords that look at it alone. `child` numbers a subschema."""
    types = schema.get("type")
    allowed = [types] if isinstance(types, str) else cast("list[str] | None", types)
    out: list[Alternative] = []
    for name, kind in KINDS.items():
        whole = name == "number" and allowed is not None and "number" not in allowed and "integer" in allowed
        if allowed is not None and name not in allowed and not whole:
            continue
        match kind():
            case Number():
                out += _number(schema, whole)
            case String():
                out += _string(schema, formats)
            case Array():
                out.append(_array(schema, child))
            case Object():
                out.append(_object(schema, child))
            case simple:
                out.append(simple)
    return tuple(out)


def _string(schema: Schema, formats: bool) -> Iterable[Alternative]:
    least, most = _count(schema, "minLength") or 0, _count(schema, "maxLength")
    if most is not None and least > most:
        return ()
    patterns = frozenset({cast(str, schema["pattern"])} if "pattern" in schema else ())
    asserted = frozenset({cast(str, schema["format"])} if formats and "format" in schema else ())
    return (String(least, most, patterns, frozenset(), asserted),)


def _array(schema: Schema, child: Child) -> Array:
    prefix = tuple(child(cast(Subschema, one)) for one in cast(list[Json], schema.get("prefixItems", [])))
    items: tuple[Items, ...] = ()
    if prefix or "items" in schema:
        rest = child(cast(Subschema, schema.get("items", True)))
        items = (Items(prefix, rest, all_counted="items" in schema),)
    contains: tuple[tuple[Conjunction, int], ...] = ()
    if "contains" in schema:
        if "maxContains" in schema:
            raise SchemaRefused("no grammar can count what an item is not", "maxContains")
        wanted = _count(schema, "minContains")
        wanted = 1 if wanted is None else wanted
        if wanted:
            contains = ((child(cast(Subschema, schema["contains"])), wanted),)
    return Array(
        items,
        _count(schema, "minItems") or 0,
        _count(schema, "maxItems"),
        contains,
        schema.get("uniqueItems") is True,
        finds="contains" in schema,
    )


def _object(schema: Schema, child: Child) -> Object:
    def children(keyword: str) -> tuple[tuple[str, Conjunction], ...]:
        found = cast(dict[str, Subschema], schema.get(keyword, {}))
        return tuple((name, child(one)) for name, one in found.items())

    members: tuple[Members, ...] = ()
    names, patterns = children("properties"), children("patternProperties")
    if names or patterns or "additionalProperties" in schema:
        rest = child(cast(Subschema, schema.get("additionalProperties", True)))
        members = (Members(names, patterns, rest, all_counted="additionalProperties" in schema),)
    rules = ANYTHING
    if "propertyNames" in schema:
        rules = child(cast(Subschema, schema["propertyNames"]))
    return Object(
        members,
        tuple(dict.fromkeys(cast(list[str], schema.get("required", [])))),
        _count(schema, "minProperties") or 0,
        _count(schema, "maxProperties"),
        rules,
    )


def _count(schema: Schema, keyword: str) -> int | None:
    value = schema.get(keyword)
    return None if value is None else int(cast(int, value))


def _number(schema: Schema, whole: bool) -> Iterable[Number]:
    low, low_open, high, high_open = None, False, None, False
    for keyword, is_open in (("minimum", False), ("exclusiveMinimum", True)):
        if keyword in schema:
            bound = Decimal(cast(int, schema[keyword]))
            if low is None or bound > low or (bound == low and is_open):
                low, low_open = bound, is_open
    for keyword, is_open in (("maximum", False), ("exclusiveMaximum", True)):
        if keyword in schema:
            bound = Decimal(cast(int, schema[keyword]))
            if high is None or bound < high or (bound == high and is_open):
                high, high_open = bound, is_open
    if low is not None and high is not None and (low > high or (low == high and (low_open or high_open))):
        return ()
    steps = {Decimal(cast(int, schema["multipleOf"]))} if "multipleOf" in schema else set()
    if whole:
        steps.add(Decimal(1))
    return (Number(low, low_open, high, high_open, frozenset(steps)),)
