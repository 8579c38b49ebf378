"""Numbers of a schema as rules: an automaton that reads decimal digits, compares them with the bounds and keeps the
remainder by the step.

An integral value may be written with `.0`, since 1.0 is an integer to JSON Schema. Bounded numbers have no exponent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from math import lcm

from headrace.engine.text.json_schema.alternatives import Number
from headrace.engine.text.json_schema.ebnf import Rules
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.graph import reaching
from headrace.engine.text.json_schema.values import is_number

MOST_REMAINDER = 1000
"""Largest numerator of a step that is read digit by digit."""
MOST_STATES = 20_000
MOST_DIGITS = 40


def number_rule(one: Number, rules: Rules) -> str | None:
    """An expression for the texts of the numbers; None when there are none. Raises SchemaRefused."""
    if any(is_number(gone.value) for gone in one.excluded):
        raise SchemaRefused("a single number cannot be taken out of a range", "not")
    if one.low is None and one.high is None and not one.not_steps:
        if not one.steps:
            return "any_number"
        if one.steps == {Decimal(1)}:
            return '"-"? ("0" | [1-9] [0-9]*) (".0")?'
    branches = []
    # Below zero the automaton reads the amount, so the bounds change sides.
    for sign, low, high in (
        ("", (one.low, one.low_open), (one.high, one.high_open)),
        ('"-" ', _opposite(one.high, one.high_open), _opposite(one.low, one.low_open)),
    ):
        start = _Reader(low, high, one.steps, one.not_steps).rule(rules)
        if start is not None:
            branches.append(sign + start)
    return f"({' | '.join(branches)})" if branches else None


def _opposite(bound: Decimal | None, is_open: bool) -> tuple[Decimal | None, bool]:
    return (None if bound is None else -bound), is_open


@dataclass(frozen=True)
class _Digits:
    """A bound of an amount, its digits before and after the point."""

    whole: str
    part: str
    is_open: bool

    @classmethod
    def of(cls, bound: Decimal, is_open: bool) -> _Digits:
        whole, _, part = f"{bound:f}".partition(".")
        if len(whole) + len(part) > MOST_DIGITS:
            raise SchemaRefused(f"{bound} has more than {MOST_DIGITS} digits", "minimum or maximum")
        return cls(whole.lstrip("0") or "0", part.rstrip("0"), is_open)


@dataclass(frozen=True)
class _State:
    """`phase`: 0 nothing read, 1 a leading zero, 2 in the whole part, 3 behind the point, 4 behind its first digit.
    `count`: whole digits read, up to one more than the longest bound has. `orders`: how what was read compares with
    each bound (−1, 0, 1). `place`: digits behind the point, as far as they matter. `left`: remainder."""

    phase: int = 0
    count: int = 0
    orders: tuple[int, ...] = ()
    place: int = 0
    left: int = 0


class _Reader:
    """Amounts ≥ 0 between two bounds, in steps."""

    def __init__(
        self,
        low: tuple[Decimal | None, bool],
        high: tuple[Decimal | None, bool],
        steps: frozenset[Decimal],
        not_steps: frozenset[Decimal],
    ) -> None:
        self.nothing = high[0] is not None and (high[0] < 0 or (high[0] == 0 and high[1]))
        self.low = None if low[0] is None or low[0] < 0 else _Digits.of(*low)  # type: ignore[arg-type]
        self.high = None if high[0] is None or self.nothing else _Digits.of(*high)  # type: ignore[arg-type]
        self.bounds = [bound for bound in (self.low, self.high) if bound is not None]
        fractions = [Fraction(step) for step in (*steps, *not_steps)]
        self.scale = 0
        while any((step * 10**self.scale).denominator != 1 for step in fractions):
            self.scale += 1
        whole = [int(step * 10**self.scale) for step in fractions]
        self.wanted, self.unwanted = whole[: len(steps)], whole[len(steps) :]
        self.modulus = lcm(*whole) if whole else 1
        if self.modulus > MOST_REMAINDER:
            raise SchemaRefused(f"the steps are too fine or too large together ({self.modulus})", "multipleOf")
        self.integral = any(step.denominator == 1 for step in map(Fraction, steps))
        self.longest = max((len(bound.whole) for bound in self.bounds), default=0)
        self.deepest = max((len(bound.part) for bound in self.bounds), default=0)

    def rule(self, rules: Rules) -> str | None:
        if self.nothing:
            return None
        start = _State(orders=(0,) * len(self.bounds))
        edges: dict[_State, dict[_State, list[str]]] = {}
        queue = [start]
        while queue:
            state = queue.pop()
            if state in edges:
                continue
            if len(edges) > MOST_STATES:
                raise SchemaRefused("its bounds and steps make too large an automaton", "multipleOf")
            targets = edges[state] = {}
            for char in "0123456789.":
                target = self._step(state, char)
                if target is not None:
                    targets.setdefault(target, []).append(char)
                    queue.append(target)
        live = reaching({state for state in edges if self._accepts(state)}, edges)
        if start not in live:
            return None
        names = {state: rules.name("n") for state in edges if state in live}
        for state, name in names.items():
            branches = ['""'] if self._accepts(state) else []
            for target, chars in edges[state].items():
                if target in live:
                    branches.append(f"[{''.join(chars)}] {names[target]}")
            rules.set(name, branches)
        return names[start]

    def _step(self, state: _State, char: str) -> _State | None:
        if char == ".":
            return None if state.phase in (0, 3, 4) else replace(state, phase=3, orders=self._at_point(state))
        digit = int(char)
        if state.phase < 3:
            return self._whole_digit(state, digit)
        return self._part_digit(state, digit)

    def _whole_digit(self, state: _State, digit: int) -> _State | None:
        if state.phase == 1:
            return None  # no digit after a leading zero
        orders = []
        for bound, order in zip(self.bounds, state.orders, strict=True):
            if order == 0 and state.count < len(bound.whole):
                order = _order(digit, int(bound.whole[state.count]))
            orders.append(order)
        left = (state.left * 10 + digit * 10**self.scale) % self.modulus
        count = min(state.count + 1, self.longest + 1)
        return _State(1 if state.phase == 0 and digit == 0 else 2, count, tuple(orders), 0, left)

    def _at_point(self, state: _State) -> tuple[int, ...]:
        """How the whole part alone compares: the longer is the larger."""
        return tuple(
            _order(state.count, len(bound.whole)) or order
            for bound, order in zip(self.bounds, state.orders, strict=True)
        )

    def _part_digit(self, state: _State, digit: int) -> _State | None:
        if self.integral and (digit or state.phase == 4):
            return None
        orders = []
        for bound, order in zip(self.bounds, state.orders, strict=True):
            if order == 0:
                order = _order(digit, int(bound.part[state.place]) if state.place < len(bound.part) else 0)
            orders.append(order)
        if state.place < self.scale:
            left = (state.left + digit * 10 ** (self.scale - state.place - 1)) % self.modulus
        elif digit and (self.wanted or self.unwanted):
            return None if self.wanted else replace(state, phase=4, orders=tuple(orders), left=-1)
        else:
            left = state.left
        place = min(state.place + 1, max(self.scale, self.deepest))
        return _State(4, state.count, tuple(orders), place, left)

    def _accepts(self, state: _State) -> bool:
        if state.phase in (0, 3):
            return False
        orders = list(state.orders if state.phase == 4 else self._at_point(state))
        for place, bound in enumerate(self.bounds):
            if orders[place] == 0 and any(int(one) for one in bound.part[state.place :]):
                orders[place] = -1
        if self.low is not None and (orders[0] < 0 or (orders[0] == 0 and self.low.is_open)):
            return False
        if self.high is not None and (orders[-1] > 0 or (orders[-1] == 0 and self.high.is_open)):
            return False
        if any(state.left % step for step in self.wanted):
            return False
        return state.left < 0 or all(state.left % step for step in self.unwanted)


def _order(a: int, b: int) -> int:
    return (a > b) - (a < b)
