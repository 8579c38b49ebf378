"""What a schema allows, as a union of alternatives of one type each, and their intersection.

A `Conjunction` is a set of subschemas that a value has to satisfy all at once, named by number (`documents.py`); the
empty one allows everything. Intersecting two alternatives of a type unites the conjunctions of their parts, so nothing
is expanded before it is looked at, and recursive schemas need no special care.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from headrace.engine.text.json_schema.values import Json, identity

Conjunction = frozenset[int]
ANYTHING: Conjunction = frozenset()


@dataclass(frozen=True)
class Literal:
    """One value."""

    value: Json = field(compare=False)
    key: str = ""

    @classmethod
    def of(cls, value: Json) -> Literal:
        return cls(value, identity(value))


@dataclass(frozen=True)
class Null:
    """null."""


@dataclass(frozen=True)
class Boolean:
    """true or false."""


@dataclass(frozen=True)
class Number:
    """A number within bounds that is a multiple of all `steps` (1: an integer) and of none of `not_steps`."""

    low: Decimal | None = None
    low_open: bool = False
    high: Decimal | None = None
    high_open: bool = False
    steps: frozenset[Decimal] = frozenset()
    not_steps: frozenset[Decimal] = frozenset()
    excluded: tuple[Literal, ...] = ()


@dataclass(frozen=True)
class String:
    """A string of `least` … `most` code points in which every pattern is found and none of `not_patterns` is (ECMA-262
    expressions, unanchored); `wholes` match all of it and `not_wholes` do not (names of formats)."""

    least: int = 0
    most: int | None = None
    patterns: frozenset[str] = frozenset()
    not_patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    excluded: tuple[Literal, ...] = ()


@dataclass(frozen=True)
class Items:
    """One schema's say over an array's items: by position, then the rest."""

    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction = ANYTHING
    counts: bool = True
    """For unevaluatedItems."""
    all_counted: bool = False

    def at(self, index: int) -> Conjunction:
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True)
class Array:
    """An array. `contains`: at least so many items satisfy the conjunction."""

    items: tuple[Items, ...] = ()
    least: int = 0
    most: int | None = None
    contains: tuple[tuple[Conjunction, int], ...] = ()
    unique: bool = False
    excluded: tuple[Literal, ...] = ()
    finds: bool = False
    """Some contains evaluates the items that it finds, for unevaluatedItems."""

    @property
    def prefix(self) -> int:
        """Positions that some schema tells from the rest."""
        return max((len(part.prefix) for part in self.items), default=0)

    def at(self, index: int) -> Conjunction:
        return ANYTHING.union(*(part.at(index) for part in self.items))


@dataclass(frozen=True)
class Members:
    """One schema's say over an object's members: by name, by pattern, else `rest`."""

    names: tuple[tuple[str, Conjunction], ...] = ()
    patterns: tuple[tuple[str, Conjunction], ...] = ()
    rest: Conjunction = ANYTHING
    counts: bool = True
    """For unevaluatedProperties."""
    all_counted: bool = False


@dataclass(frozen=True)
class Object:
    """An object. `required` in the order of the schema; `name_rules`: conjunctions that every name satisfies."""

    members: tuple[Members, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    name_rules: Conjunction = ANYTHING
    excluded: tuple[Literal, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names that some schema speaks of, in its order: properties, then others that are required."""
        named = [name for part in self.members for name, _ in part.names]
        return tuple(dict.fromkeys((*named, *self.required)))


Alternative = Null | Boolean | Number | String | Array | Object | Literal
Alternatives = tuple[Alternative, ...]
EVERYTHING: Alternatives = (Null(), Boolean(), Number(), String(), Array(), Object())
KINDS: dict[str, type[Null | Boolean | Number | String | Array | Object]] = {
    "null": Null,
    "boolean": Boolean,
    "number": Number,
    "string": String,
    "array": Array,
    "object": Object,
}


def both(a: Alternative, b: Alternative) -> Alternative | None:
    """What satisfies both, for alternatives of one type other than Literal; None for nothing."""
    match a, b:
        case (Null(), Null()) | (Boolean(), Boolean()):
            return a
        case Number(), Number():
            return _number(a, b)
        case String(), String():
            most = _least_of(a.most, b.most)
            least = max(a.least, b.least)
            if most is not None and least > most:
                return None
            return String(
                least,
                most,
                a.patterns | b.patterns,
                a.not_patterns | b.not_patterns,
                a.formats | b.formats,
                a.excluded + b.excluded,
            )
        case Array(), Array():
            most, least = _least_of(a.most, b.most), max(a.least, b.least)
            if most is not None and least > most:
                return None
            contains = tuple(dict.fromkeys(a.contains + b.contains))
            return Array(
                a.items + b.items,
                least,
                most,
                contains,
                a.unique or b.unique,
                a.excluded + b.excluded,
                a.finds or b.finds,
            )
        case Object(), Object():
            most, least = _least_of(a.most, b.most), max(a.least, b.least)
            required = tuple(dict.fromkeys(a.required + b.required))
            if most is not None and max(least, len(required)) > most:
                return None
            return Object(
                a.members + b.members, required, least, most, a.name_rules | b.name_rules, a.excluded + b.excluded
            )
        case _:
            return None


def not_counted(alternatives: Sequence[Alternative]) -> Alternatives:
    """The same for a place whose evaluations do not count for unevaluated… (under `not`)."""
    out: list[Alternative] = []
    for one in alternatives:
        if isinstance(one, Array):
            one = replace(one, items=tuple(replace(part, counts=False) for part in one.items))
        elif isinstance(one, Object):
            one = replace(one, members=tuple(replace(part, counts=False) for part in one.members))
        out.append(one)
    return tuple(out)


def _number(a: Number, b: Number) -> Number | None:
    low, low_open = _tighter((a.low, a.low_open), (b.low, b.low_open), lower=True)
    high, high_open = _tighter((a.high, a.high_open), (b.high, b.high_open), lower=False)
    if low is not None and high is not None and (low > high or (low == high and (low_open or high_open))):
        return None
    return Number(low, low_open, high, high_open, a.steps | b.steps, a.not_steps | b.not_steps, a.excluded + b.excluded)


def _tighter(
    a: tuple[Decimal | None, bool], b: tuple[Decimal | None, bool], *, lower: bool
) -> tuple[Decimal | None, bool]:
    if a[0] is None or b[0] is None:
        return b if a[0] is None else a
    if a[0] == b[0]:
        return a[0], a[1] or b[1]
    return a if (a[0] > b[0]) == lower else b


def _least_of(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
