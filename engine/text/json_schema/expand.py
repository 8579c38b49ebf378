"""From subschemas to alternatives: every keyword of the 2020-12 dialect is turned into them or refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import combinations
from typing import cast

from headrace.engine.text.json_schema.alternatives import (
    ANYTHING,
    EVERYTHING,
    KINDS,
    Alternative,
    Alternatives,
    Array,
    Conjunction,
    Literal,
    Number,
    Object,
    String,
    both,
    not_counted,
)
from headrace.engine.text.json_schema.documents import Documents, Negated, Subschema
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.members import members_of
from headrace.engine.text.json_schema.negate import negated
from headrace.engine.text.json_schema.own import own_alternatives
from headrace.engine.text.json_schema.satisfies import satisfies
from headrace.engine.text.json_schema.unevaluated import close_items, close_members
from headrace.engine.text.json_schema.values import Json, type_of

MOST_ALTERNATIVES = 512
MOST_OVERLAPPING = 4
"""Branches of an anyOf below an unevaluated…, whose every combination is an alternative then."""
Schema = dict[str, Json]


class Expander:
    """Alternatives of the subschemas of one document. `formats`: `format` is asserted, not an annotation."""

    def __init__(self, documents: Documents, formats: bool) -> None:
        self.documents = documents
        self.formats = formats
        self._known: dict[tuple[int, bool], Alternatives] = {}
        self._open: set[int] = set()
        self._conjunctions: dict[Conjunction, Alternatives] = {}

    def conjunction(self, numbers: Conjunction) -> Alternatives:
        """What satisfies all of them. Some alternatives may be empty for deeper reasons (`productive.py`)."""
        known = self._conjunctions.get(numbers)
        if known is None:
            known = EVERYTHING
            for number in sorted(numbers):
                known = self.meet(known, self.expand(number))
            self._conjunctions[numbers] = known
        return known

    def meet(self, left: Alternatives, right: Alternatives) -> Alternatives:
        """What satisfies both. Literals are looked at one by one, so any keyword may stand beside them."""
        out: dict[Alternative, None] = {}
        for a in left:
            for b in right:
                if isinstance(a, Literal):
                    met: Alternative | None = a if satisfies(a.value, b, self.conjunction) else None
                elif isinstance(b, Literal):
                    met = b if satisfies(b.value, a, self.conjunction) else None
                else:
                    met = both(a, b)
                if met is not None:
                    out[met] = None
        if len(out) > MOST_ALTERNATIVES:
            raise SchemaRefused(f"its combinations make more than {MOST_ALTERNATIVES} alternatives")
        return tuple(out)

    def expand(self, number: int, collect: bool = False) -> Alternatives:
        """Alternatives of one subschema. `collect`: some unevaluated… around it needs to know what was evaluated, so
        branches of anyOf that may hold together are alternatives together, too."""
        known = self._known.get((number, collect))
        if known is not None:
            return known
        if number in self._open:
            raise SchemaRefused("it refers to itself without going into a value", "$ref")
        self._open.add(number)
        try:
            alternatives = self._expand(number, self.documents[number].schema, collect)
        finally:
            self._open.discard(number)
        self._known[number, collect] = alternatives
        return alternatives

    def _expand(self, number: int, schema: Subschema, collect: bool) -> Alternatives:
        if isinstance(schema, bool):
            return EVERYTHING if schema else ()
        if isinstance(schema, Negated):
            return self._failing(schema)
        collect = collect or "unevaluatedItems" in schema or "unevaluatedProperties" in schema
        alternatives = own_alternatives(schema, lambda part: self._child(number, part), self.formats)
        if "const" in schema:
            alternatives = self.meet(alternatives, (Literal.of(schema["const"]),))
        if "enum" in schema:
            values = cast(list[Json], schema["enum"])
            alternatives = self.meet(alternatives, tuple(dict.fromkeys(Literal.of(value) for value in values)))
        for part in self._applicators(number, schema, collect):
            alternatives = self.meet(alternatives, part)
        if "unevaluatedItems" in schema:
            rest = self._child(number, cast(Subschema, schema["unevaluatedItems"]))
            alternatives = tuple(close_items(one, rest) for one in alternatives)
        if "unevaluatedProperties" in schema:
            rest = self._child(number, cast(Subschema, schema["unevaluatedProperties"]))
            alternatives = tuple(close_members(one, rest) for one in alternatives)
        return alternatives

    # --- parts -----------------------------------------------------------------------------------------------

    def _child(self, number: int, schema: Subschema) -> Conjunction:
        if schema is True or schema == {}:
            return ANYTHING
        return frozenset({self._number(number, schema)})

    def _number(self, number: int, schema: Subschema) -> int:
        return self.documents.number(schema, self.documents[number].resolver)

    # --- keywords that look at the value itself ---------------------------------------------------------------

    def _applicators(self, number: int, schema: Schema, collect: bool) -> Iterable[Alternatives]:
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema:
                yield self.expand(self.documents.follow(number, keyword, schema[keyword]), collect)
        if "$recursiveRef" in schema:
            raise SchemaRefused("is not of the 2020-12 dialect", "$recursiveRef")
        for one in cast(list[Subschema], schema.get("allOf", [])):
            yield self._inner(number, one, collect)
        if "anyOf" in schema:
            yield self._any(number, cast(list[Subschema], schema["anyOf"]), collect)
        if "oneOf" in schema:
            yield self._one(number, cast(list[Subschema], schema["oneOf"]), collect)
        if "not" in schema:
            yield self._not(number, cast(Subschema, schema["not"]))
        if "if" in schema:
            test = cast(Subschema, schema["if"])
            then = self._inner(number, cast(Subschema, schema.get("then", True)), collect)
            holds = self.meet(self._inner(number, test, collect), then)
            otherwise = self._inner(number, cast(Subschema, schema.get("else", True)), collect)
            yield _union(holds, self.meet(self._not(number, test), otherwise))
        for name, others in cast(dict[str, Json], schema.get("dependentRequired", {})).items():
            yield self._dependent(number, name, {"required": others}, collect)
        for name, dependent in cast(dict[str, Subschema], schema.get("dependentSchemas", {})).items():
            yield self._dependent(number, name, dependent, collect)

    def _inner(self, number: int, schema: Subschema, collect: bool) -> Alternatives:
        return self.expand(self._number(number, schema), collect)

    def _any(self, number: int, branches: Sequence[Subschema], collect: bool) -> Alternatives:
        found = [self._inner(number, one, collect) for one in branches]
        if not collect:
            return _union(*found)
        if len(found) > MOST_OVERLAPPING:
            raise SchemaRefused(f"has more than {MOST_OVERLAPPING} branches below an unevaluated… keyword", "anyOf")
        together: list[Alternatives] = []
        for size in range(len(found), 0, -1):
            for group in combinations(found, size):
                met = EVERYTHING
                for part in group:
                    met = self.meet(met, part)
                together.append(met)
        return _union(*together)

    def _one(self, number: int, branches: Sequence[Subschema], collect: bool) -> Alternatives:
        """Each branch without the others; where two cannot hold together nothing has to be taken away."""
        found = [self._inner(number, one, collect) for one in branches]
        out: list[Alternatives] = []
        for place, mine in enumerate(found):
            left = mine
            for other, theirs in enumerate(found):
                if other != place and not self.nothing(self.meet(mine, theirs)):
                    left = self.meet(left, self._not(number, branches[other]))
            out.append(left)
        return _union(*out)

    def _not(self, number: int, schema: Subschema) -> Alternatives:
        if isinstance(schema, dict) and set(schema) == {"$ref"}:
            number = self.documents.follow(number, "$ref", schema["$ref"])
            schema = self.documents[number].schema
        parts = [self._inner(number, one, False) for one in negated(schema, self.formats)]
        return not_counted(_union(*parts))

    def _dependent(self, number: int, name: str, schema: Subschema, collect: bool) -> Alternatives:
        absent = self._inner(number, {"properties": {name: False}}, False)
        present = self._inner(number, {"type": "object", "required": [name]}, False)
        return _union(not_counted(absent), self.meet(present, self._inner(number, schema, collect)))

    def _failing(self, schema: Negated) -> Alternatives:
        value = schema.value
        if schema.keyword == "multipleOf":
            return (Number(not_steps=frozenset({Decimal(cast(int, value))})),)
        if schema.keyword == "pattern":
            return (String(not_patterns=frozenset({cast(str, value)})),)
        values = [value] if schema.keyword == "const" else cast(list[Json], value)
        out: list[Alternative] = []
        for name, kind in KINDS.items():
            gone = tuple(Literal.of(one) for one in values if type_of(one) == name)
            if name == "boolean" and gone:
                out += [one for one in (Literal.of(True), Literal.of(False)) if one not in gone]
            elif not gone:
                out.append(kind())
            elif name != "null":
                out.append(replace(cast(String, kind()), excluded=gone))
        return tuple(out)

    def admits(self, value: Json, numbers: Conjunction) -> bool:
        """The value satisfies the conjunction."""
        return any(satisfies(value, one, self.conjunction) for one in self.conjunction(numbers))

    # --- emptiness --------------------------------------------------------------------------------------------

    def nothing(self, alternatives: Alternatives, below: frozenset[Conjunction] = frozenset()) -> bool:
        """Surely no value satisfies any of them."""
        return all(self._empty(one, below) for one in alternatives)

    def _empty(self, one: Alternative, below: frozenset[Conjunction]) -> bool:
        if isinstance(one, Object):
            wanted = [members_of(one, name) for name in one.required]
        elif isinstance(one, Array):
            wanted = [one.at(place) for place in range(min(one.least, 8))]
        else:
            return False
        return any(part not in below and self.nothing(self.conjunction(part), below | {part}) for part in wanted)


def _union(*parts: Alternatives) -> Alternatives:
    return tuple(dict.fromkeys(one for part in parts for one in part))
