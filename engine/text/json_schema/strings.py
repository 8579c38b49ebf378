"""Strings of a schema as rules: the automaton of their code points, each written as compact JSON writes it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from operator import itemgetter
from typing import Any

from interegular.fsm import FSM, anything_else

from headrace.engine.text.json_schema.alternatives import String
from headrace.engine.text.json_schema.ebnf import Rules, in_class, quoted
from headrace.engine.text.json_schema.formats import pattern_of
from headrace.engine.text.json_schema.patterns import automaton, checked
from headrace.engine.text.json_schema.values import string_text

_CONTROLS = frozenset(map(chr, range(0x20)))
MOST_EXACT = 16
"""Longest bound on a string's length whose characters are counted one by one, escaped ones too."""
_PLAIN = r'[^"\\\u0000-\u001f\ud800-\udfff]'
_SURROGATES = r"\ud800-\udfff"
"""No characters, though xgrammar's negated classes take their three bytes for one; such text would not be UTF-8."""
_ESCAPED = frozenset({'"', "\\"}) | _CONTROLS
"""Characters that JSON text cannot hold as they are."""


def language(one: String, without: Iterable[str] = ()) -> FSM | None:
    """Automaton of the strings, None where their length alone is bounded. `without`: single strings that are not in it.
    Raises SchemaRefused for an expression that cannot be made one."""
    gone = [*without, *(gone.value for gone in one.excluded if isinstance(gone.value, str))]
    parts = [automaton(pattern) for pattern in sorted(one.patterns)]
    parts += [automaton(pattern_of(name), anchored=True) for name in sorted(one.formats)]
    parts += [automaton(pattern).everythingbut() for pattern in sorted(one.not_patterns)]
    if gone:
        parts.append(automaton("|".join(f"(?:{_escape(text)})" for text in gone), anchored=True).everythingbut())
    if not parts:
        return None
    if one.least or one.most is not None:
        parts.append(
            automaton(
                f"(?:.|[\\n\\r\\u2028\\u2029]){{{one.least},{'' if one.most is None else one.most}}}", anchored=True
            )
        )
    met = parts[0]
    for part in parts[1:]:
        met = checked((met & part).reduce())
    return met


def string_rule(one: String, rules: Rules, without: Iterable[str] = ()) -> str | None:
    """An expression for the JSON text of the strings; None when there are none."""
    met = language(one, without)
    if met is None:
        if one.least == 0 and one.most is None:
            return "any_string"
        return _counted(one.least, one.most, rules)
    if met.empty():
        return None
    return f'"\\"" {_states(met, rules)}'


def _counted(least: int, most: int | None, rules: Rules) -> str:
    """Strings of `least` to `most` characters. Up to MOST_EXACT a rule counts each of them; of longer counts the
    characters that need no escape, in one repetition, which costs as much as a single rule."""
    counted = least if most is None else most
    if counted > MOST_EXACT:
        if most is None:
            return f'"\\"" {_PLAIN}{{{least}}} rest_of_string'
        return f'"\\"" {_PLAIN}{{{least},{most}}} "\\""'
    tail = "rest_of_string" if most is None else '"\\""'
    for place in range(counted - 1, -1, -1):
        ends = ['"\\""'] if place >= least else []
        tail = rules.make("n", [*ends, f"{_PLAIN} {tail}", f"escaped {tail}"])
    return f'"\\"" {tail}'


def _states(made: FSM, rules: Rules) -> str:
    """A right-linear rule per state that can still accept; the closing quote stands in the accepting ones."""
    live = {state for state in made.states if made.islive(state)}
    names: dict[Any, str] = {}
    bodies: dict[str, list[str]] = {}

    def name(state: Any) -> str:
        if state not in names:
            names[state] = rules.name("s")
            queue.append(state)
        return names[state]

    queue: list[Any] = []
    name(made.initial)
    for state in queue:
        targets: dict[Any, list[int]] = {}
        for symbol, target in made.map.get(state, {}).items():
            if target in live:
                targets.setdefault(target, []).append(symbol)
        # The library numbers symbols and states as its sets come, which no two processes do alike.
        ways = sorted(((_characters(made, symbols), target) for target, symbols in targets.items()), key=itemgetter(0))
        branches = ['"\\""'] if state in made.finals else []
        for pieces, target in ways:
            branches += [f"{piece} {name(target)}" for piece in pieces]
        bodies[names[state]] = branches
    for rule, branches in bodies.items():
        rules.set(rule, branches)
    return names[made.initial]


def _characters(made: FSM, symbols: list[int]) -> list[str]:
    """Expressions for one character of these symbols in JSON text."""
    listed: set[str] = set()
    inverted = False
    for symbol in symbols:
        for char in made.alphabet.by_transition[symbol]:
            if char is anything_else:
                inverted = True
            else:
                listed.add(char)
    if inverted:
        everywhere = {
            char for chars in made.alphabet.by_transition.values() for char in chars if char is not anything_else
        }
        gone = everywhere - listed
        return [f"[^{_ranges(gone | _ESCAPED)}{_SURROGATES}]", *_written(_ESCAPED - gone)]
    plain = _ranges(listed - _ESCAPED)
    return [*([f"[{plain}]"] if plain else []), *_written(listed & _ESCAPED)]


def _ranges(some: AbstractSet[str]) -> str:
    chars, out, start = sorted(some), [], 0
    for place in range(1, len(chars) + 1):
        if place == len(chars) or ord(chars[place]) != ord(chars[place - 1]) + 1:
            first, last = chars[start], chars[place - 1]
            out.append(in_class(first) if first == last else f"{in_class(first)}-{in_class(last)}")
            start = place
    return "".join(out)


def _written(chars: AbstractSet[str]) -> list[str]:
    """Expressions for characters that are escaped; all the control characters have a common rule."""
    whole = chars >= _CONTROLS
    rest = sorted(chars - _CONTROLS if whole else chars)
    return [*(quoted(string_text(char)[1:-1]) for char in rest), *(["control"] if whole else [])]


def _escape(text: str) -> str:
    return "".join(f"\\u{{{ord(char):x}}}" for char in text)
