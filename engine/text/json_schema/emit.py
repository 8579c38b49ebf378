"""From alternatives to rules of a grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations

from headrace.engine.text.json_schema.alternatives import (
    ANYTHING,
    Alternative,
    Array,
    Boolean,
    Conjunction,
    Literal,
    Null,
    Number,
    Object,
    String,
    both,
)
from headrace.engine.text.json_schema.ebnf import Rules, quoted
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.expand import Expander
from headrace.engine.text.json_schema.graph import reaching
from headrace.engine.text.json_schema.members import members_of
from headrace.engine.text.json_schema.numbers import number_rule
from headrace.engine.text.json_schema.patterns import found_in
from headrace.engine.text.json_schema.productive import Productive
from headrace.engine.text.json_schema.strings import JSON, Spelling, string_rule
from headrace.engine.text.json_schema.values import Json, is_number, number_texts, string_text

MOST_COUNTED = 64
"""Items or members up to which a count is kept where a repetition cannot say it."""
MOST_PATTERNS = 6
"""patternProperties that may overlap: each combination is a kind of name."""

_Search = tuple[int, tuple[int, ...]]
"""Place in an array, and how many items each contains still asks for."""


class Valueless(Exception):
    """Its rule would be empty: the conjunction has no value, which shows only where its parts are put together."""

    def __init__(self, numbers: Conjunction) -> None:
        super().__init__()
        self.numbers = numbers


@dataclass(frozen=True)
class Form:
    """How an object is written: expressions around and between its members, for none, and for one of them, by the
    expression of its name and what its value satisfies."""

    begin: str
    end: str
    comma: str
    empty: str
    member: Callable[[str, Conjunction], str]


class Emitter:
    """Writes one grammar. Raises SchemaRefused for what no grammar can enforce."""

    def __init__(self, expander: Expander, productive: Productive, spelling: Spelling = JSON) -> None:
        """`spelling`: of every string."""
        self.rules = Rules(spelling.common)
        self._spelling = spelling
        self._form = Form('"{"', '"}"', "comma ", '""', lambda name, numbers: f"{name} colon {self.value(numbers)}")
        self._expander = expander
        self._productive = productive
        self._names: dict[Conjunction, str] = {}

    def value(self, numbers: Conjunction) -> str:
        """The rule for values of a conjunction; the caller believes that there are some. Raises Valueless."""
        if numbers == ANYTHING:
            return "any"
        name = self._names.get(numbers)
        if name is None:
            name = self._names[numbers] = self.rules.name("v")
            branches = [self.alternative(one) for one in self._productive.alternatives(numbers)]
            there = [branch for branch in branches if branch is not None]
            if not there:
                raise Valueless(numbers)
            self.rules.set(name, there)
        return name

    def alternative(self, one: Alternative) -> str | None:
        """An expression for its values; None when there are none."""
        match one:
            case Null():
                return '"null"'
            case Boolean():
                return '"true" | "false"'
            case Literal():
                return self.literal(one.value)
            case Number():
                return number_rule(one, self.rules)
            case String():
                return string_rule(one, self.rules, spelling=self._spelling)
            case Array():
                return self._array(one)
            case Object():
                return self.object(one, self._form)

    def literal(self, value: Json) -> str:
        """An expression for one value."""
        if isinstance(value, list):
            items = " comma ".join(self.literal(item) for item in value)
            return f'"[" {items} "]"' if value else '"[]"'
        if isinstance(value, dict):
            members = " comma ".join(f"{self.name(name)} colon {self.literal(item)}" for name, item in value.items())
            return f'"{{" {members} "}}"' if value else '"{}"'
        if is_number(value):
            texts = " | ".join(quoted(text) for text in number_texts(value))
            return f"({texts})"
        if isinstance(value, str):
            return self.name(value)
        return '"null"' if value is None else '"true"' if value else '"false"'

    def name(self, text: str) -> str:
        """An expression for one string. Raises SchemaRefused for one that cannot be written."""
        if self._spelling.never and self._spelling.never in text:
            raise SchemaRefused(f"a text with {self._spelling.never!r} cannot be written where calls are read")
        return quoted(string_text(text))

    # --- arrays -----------------------------------------------------------------------------------------------

    def _array(self, one: Array) -> str | None:
        if one.unique and (one.most is None or one.most > 1):
            raise SchemaRefused("no grammar can compare items; use maxItems: 1 or leave it out", "uniqueItems")
        if any(isinstance(gone.value, list) for gone in one.excluded):
            raise SchemaRefused("a single array cannot be taken out", "not")
        if one.contains:
            return self._searched(one)
        # From `first` on all items are alike; up to there each place has a rule of its own.
        first = max(one.prefix, 1)
        rest = one.at(first)
        endless = self._productive.has_values(rest)
        places: list[str] = []
        for place in range(first):
            if (one.most is not None and place >= one.most) or not self._productive.has_values(one.at(place)):
                break
            places.append(self.value(one.at(place)))
        tail = ""
        if len(places) == first and endless and (one.most is None or one.most > first):
            low = max(0, one.least - first)
            high = "" if one.most is None else one.most - first
            tail = f"(comma {self.value(rest)}){{{low},{high}}}"
        elif one.least > len(places):
            return None
        name = ""
        for place in range(len(places), 0, -1):
            ahead = tail if place == first and place == len(places) else name
            here = f"{'comma ' if place > 1 else ''}{places[place - 1]} {ahead}"
            branches = [here] if one.least >= place else [here, '""']
            name = self.rules.make("a", branches)
        return f'"[" {name} "]"'

    def _searched(self, one: Array) -> str | None:
        """An array in which some items have to be found: the state is the place and what is still to be found."""
        bound = max(one.prefix, one.least, one.most or 0)
        if bound > MOST_COUNTED or sum(wanted for _, wanted in one.contains) > MOST_COUNTED:
            raise SchemaRefused(f"only with counts up to {MOST_COUNTED}", "contains")
        start = (0, tuple(wanted for _, wanted in one.contains))
        steps: dict[_Search, list[tuple[str, _Search]]] = {}
        queue = [start]
        while queue:
            at = queue.pop()
            if at not in steps:
                steps[at] = list(self._search_steps(one, at, max(bound, 1)))
                queue += [target for _, target in steps[at]]
        ends = {at for at in steps if at[0] >= one.least and not any(at[1])}
        alive = reaching(ends, {at: [target for _, target in found] for at, found in steps.items()})
        if start not in alive:
            return None
        names = {at: self.rules.name("c") for at in steps if at in alive}
        for at, name in names.items():
            branches = ['""'] if at in ends else []
            self.rules.set(name, branches + [f"{text} {names[to]}" for text, to in steps[at] if to in alive])
        return f'"[" {names[start]} "]"'

    def _search_steps(self, one: Array, at: _Search, bound: int) -> Iterator[tuple[str, _Search]]:
        place, left = at
        if one.most is not None and place >= one.most:
            return
        for group in _subsets([index for index, wanted in enumerate(left) if wanted]):
            numbers = one.at(place).union(*(one.contains[index][0] for index in group))
            if self._productive.has_values(numbers):
                then = tuple(wanted - (index in group) for index, wanted in enumerate(left))
                yield f"{'comma ' if place else ''}{self.value(numbers)}", (min(place + 1, bound), then)

    # --- objects ----------------------------------------------------------------------------------------------

    def object(self, one: Object, form: Form) -> str | None:
        """An expression for objects; None when there are none."""
        if any(isinstance(gone.value, dict) for gone in one.excluded):
            raise SchemaRefused("a single object cannot be taken out", "not")
        named = self._named(one, form)
        if named is None:
            return None
        extras = self._extras(one, form)
        required = set(one.required)
        if extras and one.least > max(1, len(required)):
            raise SchemaRefused("no grammar can tell whether two free names are equal", "minProperties")
        counting = one.least > len(required) or one.most is not None
        top = max(one.least, (one.most or 0) + 1) if counting else 1
        if top > MOST_COUNTED:
            if one.most is not None and not extras and one.most >= len(named) and one.least <= len(required):
                counting, top = False, 1
            else:
                raise SchemaRefused(f"only up to {MOST_COUNTED}", "minProperties or maxProperties")
        names: dict[tuple[int, int], str] = {}
        # A count that leads nowhere has no rule: too little room for what is required, or too little that could come.
        still = [sum(name in required for name, _ in named[place:]) for place in range(len(named) + 1)]

        def alive(place: int, count: int) -> bool:
            if one.most is not None and counting and count + still[place] > one.most:
                return False
            return not counting or bool(extras) or count + len(named) - place >= one.least

        def state(place: int, count: int) -> str:
            if (place, count) in names:
                return names[place, count]
            name = names[place, count] = self.rules.name("o")
            self.rules.set(name, branches(place, count))
            return name

        def branches(place: int, count: int) -> Iterator[str]:
            comma = form.comma if count else ""
            then = min(count + 1, top)
            if place < len(named):
                key, member = named[place]
                if alive(place + 1, then):
                    yield f"{comma}{member} {state(place + 1, then)}"
                if key not in required and alive(place + 1, count):
                    yield state(place + 1, count)
                return
            if not counting or count >= one.least:
                yield '""' if count else form.empty
            if not counting or one.most is None or count < one.most:
                for member in extras:
                    yield f"{comma}{member} {state(place, then)}"

        return f"{form.begin} {state(0, 0)} {form.end}" if alive(0, 0) else None

    def _named(self, one: Object, form: Form) -> list[tuple[str, str]] | None:
        """Names of their own with their members; None when a required one can have no value."""
        out: list[tuple[str, str]] = []
        for name in one.names:
            numbers = members_of(one, name)
            if self._allows(one, name) and self._productive.has_values(numbers):
                out.append((name, form.member(self.name(name), numbers)))
            elif name in one.required:
                return None
        return out

    def _allows(self, one: Object, name: str) -> bool:
        return not one.name_rules or self._expander.admits(name, one.name_rules)

    def _extras(self, one: Object, form: Form) -> list[str]:
        """Members of other names, by the patterns that these match."""
        patterns = tuple(dict.fromkeys(pattern for part in one.members for pattern, _ in part.patterns))
        if len(patterns) > MOST_PATTERNS:
            raise SchemaRefused(f"more than {MOST_PATTERNS} patterns in one object", "patternProperties")
        out: list[str] = []
        for group in _subsets(list(range(len(patterns)))):
            numbers: Conjunction = ANYTHING
            for part in one.members:
                matched = [value for pattern, value in part.patterns if patterns.index(pattern) in group]
                numbers = numbers.union(*(matched or [part.rest]))
            if not self._productive.has_values(numbers):
                continue
            matching = frozenset(patterns[index] for index in group)
            other = frozenset(patterns) - matching
            for rule in self._free_names(one, String(patterns=matching, not_patterns=other)):
                out.append(form.member(rule, numbers))
        return out

    def _free_names(self, one: Object, kind: String) -> Iterator[str]:
        """Rules of names of a kind which are none of the object's own."""
        for rule in self._expander.conjunction(one.name_rules):
            if isinstance(rule, Literal):
                if isinstance(rule.value, str) and rule.value not in one.names and self._matches(rule.value, kind):
                    yield self.name(rule.value)
            elif isinstance(rule, String):
                met = both(rule, kind)
                text = string_rule(met, self.rules, one.names, self._spelling) if isinstance(met, String) else None
                if text is not None:
                    yield text

    @staticmethod
    def _matches(name: str, kind: String) -> bool:
        return all(found_in(one, name) for one in kind.patterns) and not any(
            found_in(one, name) for one in kind.not_patterns
        )


def _subsets(indices: list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(indices, size) for size in range(len(indices) + 1))
