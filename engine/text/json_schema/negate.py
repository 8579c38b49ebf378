"""The complement of a schema, as a union of schemas: for `not`, `oneOf` and `if`."""

from __future__ import annotations

from typing import cast

from headrace.engine.text.json_schema.documents import Negated, Subschema
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.values import Json

TYPES = ("null", "boolean", "number", "string", "array", "object")
Schema = dict[str, Json]


def negated(schema: Subschema, formats: bool) -> list[Subschema]:
    """Schemas of which a value satisfies one exactly if it does not satisfy `schema`. `formats`: they are asserted.
    Raises SchemaRefused for keywords whose failure no grammar could find."""
    if isinstance(schema, bool):
        return [not schema]
    if isinstance(schema, Negated):
        raise SchemaRefused("is nested in ways that are not supported", "not")
    out: list[Subschema] = []
    for keyword, value in schema.items():
        if keyword in _REFUSED:
            raise SchemaRefused("cannot be negated", keyword)
        if keyword == "format" and not formats:
            continue
        out += _keyword(keyword, value, schema)
    return out


_REFUSED = frozenset(
    [
        "$dynamicRef",
        "additionalProperties",
        "dependentSchemas",
        "format",
        "maxContains",
        "minContains",
        "oneOf",
        "patternProperties",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    ]
)
_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_COUNTS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}


def _keyword(keyword: str, value: Json, schema: Schema) -> list[Subschema]:
    if keyword in _BOUNDS:
        return [{"type": "number", _BOUNDS[keyword]: value}]
    if keyword in _COUNTS:
        kind, opposite, step = _COUNTS[keyword]
        limit = int(cast(int, value)) + step
        return [{"type": kind, opposite: limit}] if limit >= 0 else []
    if keyword in ("multipleOf", "pattern", "const", "enum"):
        return [Negated(keyword, value)]
    match keyword, value:
        case "type", _:
            return _not_types([value] if isinstance(value, str) else cast(list[Json], value))
        case "$ref", _:
            return [{"not": {"$ref": value}}]
        case "not", _:
            return [cast(Subschema, value)]
        case "allOf", list():
            return [{"not": one} for one in value]
        case "anyOf", list():
            return [{"allOf": [{"not": one} for one in value]}]
        case "required", list():
            return [{"type": "object", "properties": {cast(str, name): False}} for name in value]
        case "properties", dict():
            return [{"type": "object", "required": [n], "properties": {n: {"not": one}}} for n, one in value.items()]
        case "dependentRequired", dict():
            return [
                {"type": "object", "required": [name], "properties": {cast(str, other): False}}
                for name, others in value.items()
                for other in cast(list[Json], others)
            ]
        case "prefixItems", list():
            return [
                {"type": "array", "minItems": place + 1, "prefixItems": [*([True] * place), {"not": one}]}
                for place, one in enumerate(value)
            ]
        case "items", _:
            if "prefixItems" in schema:
                raise SchemaRefused("cannot be negated beside prefixItems", "items")
            return [{"type": "array", "contains": {"not": value}}]
        case "contains", _:
            return [{"type": "array", "items": {"not": value}}]
        case "if", _:
            then, otherwise = schema.get("then", True), schema.get("else", True)
            return [{"allOf": [value, {"not": then}]}, {"allOf": [{"not": value}, {"not": otherwise}]}]
        case _:
            return []  # then and else are `if`'s; the rest are annotations


def _not_types(types: list[Json]) -> list[Subschema]:
    others: list[Json] = [name for name in TYPES if name not in types]
    out: list[Subschema] = []
    if "integer" in types and "number" not in types:
        others.remove("number")
        out.append(Negated("multipleOf", 1))
    return [{"type": others}, *out] if others else out
