"""The subschemas of one schema by number, and what their references mean (PyPI `referencing`).

A number stands for a subschema in its place: two places with the same text and the same base share one.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.values import Json

DIALECTS = ("https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2020-12/schema#")
ROOT = "urn:headrace:schema"
"""Base of a schema without $id."""
MOST_PLACES = 20_000
MOST_DEPTH = 100


@dataclass(frozen=True)
class Negated:
    """Values of the keyword's type for which it fails: what no schema can say."""

    keyword: str
    value: Json


Subschema = bool | dict[str, Json] | Negated


@dataclass(frozen=True)
class Place:
    """A subschema and the resolver of its base."""

    schema: Subschema
    resolver: Any
    base: Any
    """The resource around it, held so that its id stays its own."""


class Documents:
    """One schema. Raises SchemaRefused for text that is no JSON, for a wrong schema and one of another dialect."""

    def __init__(self, text: str) -> None:
        self.root_schema = _parse(text)
        self._places: list[Place] = []
        self._numbers: dict[tuple[str, int], int] = {}
        self._lookups: dict[tuple[int, str], int] = {}
        self._dynamic: Counter[str] = Counter()
        _count_dynamic(self.root_schema, self._dynamic, 0)
        resource = DRAFT202012.create_resource(cast(Any, self.root_schema))
        registry: Registry[Any] = Registry().with_resource(resource.id() or ROOT, resource).crawl()
        self.root = self.number(self.root_schema, registry.resolver(resource.id() or ROOT))

    def __getitem__(self, number: int) -> Place:
        return self._places[number]

    def number(self, schema: Subschema, resolver: Any) -> int:
        """The number of a subschema that stands where `resolver` resolves."""
        if isinstance(schema, dict) and isinstance(schema.get("$id"), str) and self._places:
            resolver = resolver.in_subresource(DRAFT202012.create_resource(cast(Any, schema)))
        return self._place(schema, resolver)

    def _place(self, schema: Subschema, resolver: Any) -> int:
        """The same where `resolver` stands in the resource of the subschema's own $id already."""
        base = resolver.lookup("#").contents
        key = (_canonical(schema), id(base))
        number = self._numbers.get(key)
        if number is None:
            if len(self._places) >= MOST_PLACES:
                raise SchemaRefused(f"it unfolds into more than {MOST_PLACES} subschemas")
            number = self._numbers[key] = len(self._places)
            self._places.append(Place(schema, resolver, base))
        return number

    def follow(self, number: int, keyword: str, reference: Json) -> int:
        """What a $ref or $dynamicRef in subschema `number` names."""
        if not isinstance(reference, str):
            raise SchemaRefused("is no string", keyword)
        place = self._places[number]
        key = (id(place.base), f"{keyword}{reference}")
        known = self._lookups.get(key)
        if known is not None:
            return known
        if keyword == "$dynamicRef" and self._dynamic[reference.rpartition("#")[2]] > 1:
            raise SchemaRefused("several $dynamicAnchor of one name make its meaning depend on the way", keyword)
        try:
            resolved = place.resolver.lookup(reference)
        except Unresolvable:
            raise SchemaRefused(
                f"{reference!r} is not in the schema; other documents are not fetched", keyword
            ) from None
        if not isinstance(resolved.contents, bool | dict):
            raise SchemaRefused(f"{reference!r} names no schema", keyword)
        # It may stand below a keyword that the dialect does not know, where nothing has been checked yet.
        _check(json.loads(json.dumps(resolved.contents, default=float)), f"what {reference!r} names")
        found = self._lookups[key] = self._place(resolved.contents, resolved.resolver)
        return found


def _parse(text: str) -> bool | dict[str, Json]:
    try:
        schema = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise SchemaRefused(f"it is no JSON: {error}") from None
    if not isinstance(schema, bool | dict):
        raise SchemaRefused("a schema is an object, true or false")
    if isinstance(schema, dict):
        dialect = schema.get("$schema", DIALECTS[0])
        if dialect not in DIALECTS:
            raise SchemaRefused(f"{dialect!r} is not the 2020-12 dialect, which alone is understood", "$schema")
    _check(json.loads(text), "it")
    return schema


def _check(schema: object, what: str) -> None:
    """SchemaRefused where the keywords that the dialect knows have wrong values. Numbers are Python's own."""
    try:
        Draft202012Validator.check_schema(cast(Any, schema))
    except SchemaError as error:
        where = "/".join(str(step) for step in error.absolute_path)
        raise SchemaRefused(f"{what} is wrong at {where or 'the top'}: {error.message}") from None


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is no JSON number")


def _count_dynamic(value: object, counts: Counter[str], depth: int) -> None:
    if depth > MOST_DEPTH:
        raise SchemaRefused(f"it is nested more than {MOST_DEPTH} deep")
    if isinstance(value, dict):
        anchor = value.get("$dynamicAnchor")
        if isinstance(anchor, str):
            counts[anchor] += 1
        for item in value.values():
            _count_dynamic(item, counts, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _count_dynamic(item, counts, depth + 1)


def _canonical(schema: Subschema) -> str:
    if isinstance(schema, Negated):
        return f"¬{schema.keyword}:{_canonical(cast(Any, schema.value))}"
    return json.dumps(schema, default=lambda number: {"#": str(number)})
