"""Which conjunctions have a finite value at all: a schema that asks for itself inside itself has none, and a grammar's
rule for it would lead a generation nowhere."""

from __future__ import annotations

from headrace.engine.text.json_schema.alternatives import ANYTHING, Alternative, Array, Conjunction, Object
from headrace.engine.text.json_schema.expand import Expander
from headrace.engine.text.json_schema.members import members_of

MOST_PLACES = 256
"""Items of an array that are looked at one by one."""


class Productive:
    """The least fixed point over everything that the root reaches."""

    def __init__(self, expander: Expander, root: Conjunction) -> None:
        self._expander = expander
        self._reached: dict[Conjunction, tuple[Alternative, ...]] = {}
        self._good: set[Conjunction] = {ANYTHING}
        self._never: set[Conjunction] = set()
        self._reach(root)

    def has_values(self, numbers: Conjunction) -> bool:
        """Some value satisfies the conjunction."""
        self._reach(numbers)
        return numbers in self._good

    def alternatives(self, numbers: Conjunction) -> tuple[Alternative, ...]:
        """Its alternatives that have a value."""
        self._reach(numbers)
        return tuple(one for one in self._reached[numbers] if self._finite(one))

    def _reach(self, root: Conjunction) -> None:
        """Everything that it needs; what was reached before is decided already."""
        fresh: list[Conjunction] = []
        queue = [root]
        while queue:
            numbers = queue.pop()
            if numbers in self._reached:
                continue
            self._reached[numbers] = self._expander.conjunction(numbers)
            fresh.append(numbers)
            for one in self._reached[numbers]:
                queue += self._needs(one)
        self._decide(fresh)

    def never(self, numbers: Conjunction) -> None:
        """It has no value after all: what its alternatives need, each by itself, cannot be had together. Everything
        that was decided because it had one is decided again."""
        self._never.add(numbers)
        self._good = {ANYTHING}
        self._decide(list(self._reached))

    def _decide(self, open_ones: list[Conjunction]) -> None:
        grown = True
        while grown:
            grown = False
            for numbers in open_ones:
                if numbers in self._good or numbers in self._never:
                    continue
                if any(self._finite(one) for one in self._reached[numbers]):
                    self._good.add(numbers)
                    grown = True

    def _finite(self, one: Alternative) -> bool:
        return all(numbers in self._good for numbers in self._needs(one))

    def _needs(self, one: Alternative) -> list[Conjunction]:
        """Conjunctions without whose values the alternative has none."""
        if isinstance(one, Object):
            return [members_of(one, name) for name in one.required]
        if isinstance(one, Array):
            needed = [one.at(place) for place in range(min(one.least, MOST_PLACES))]
            return needed + [numbers for numbers, _ in one.contains]
        return []
