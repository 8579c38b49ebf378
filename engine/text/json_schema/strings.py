"""Strings of a schema as rules: the automaton of their code points, each written as compact JSON writes it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from interegular.fsm import FSM, anything_else

from headrace.engine.text.json_schema.alternatives import String
from headrace.engine.text.json_schema.ebnf import COMMON, Rules, in_class, quoted
from headrace.engine.text.json_schema.errors import SchemaRefused
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


@dataclass(frozen=True)
class Spelling:
    """How strings are written. Expressions of a grammar."""

    opening: str = '"\\""'
    closing: str = '"\\""'
    any: str = "any_string"
    """Any string, and what any string may go on with."""
    rest: str = "rest_of_string"
    plain: str = _PLAIN
    """One character, of those that may be counted."""
    escaped: frozenset[str] = _ESCAPED
    """Characters that are not written as they are; empty: all are."""
    never: str = ""
    """A text that no string has in it."""
    common: str = COMMON
    """Rules that stand in every grammar."""


JSON = Spelling()
_TEXT = Spelling(opening="", closing='""', escaped=frozenset())


def language(one: String, without: Iterable[str] = (), never: str = "") -> FSM | None:
    """Automaton of the strings, None where their length alone is bounded. `without`: single strings that are not in it;
    `never`: a text that none of them has. Raises SchemaRefused for an expression that cannot be made one."""
    gone = [*without, *(gone.value for gone in one.excluded if isinstance(gone.value, str))]
    parts = [automaton(pattern) for pattern in sorted(one.patterns)]
    parts += [automaton(pattern_of(name), anchored=True) for name in sorted(one.formats)]
    parts += [automaton(pattern).everythingbut() for pattern in sorted(one.not_patterns)]
    if gone:
        parts.append(automaton("|".join(f"(?:{_escape(text)})" for text in gone), anchored=True).everythingbut())
    if not parts:
        return None
    if never:
        parts.append(automaton(_escape(never)).everythingbut())
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


def string_rule(one: String, rules: Rules, without: Iterable[str] = (), spelling: Spelling = JSON) -> str | None:
    """An expression for the text of the strings; None when there are none."""
    met = language(one, without, spelling.never)
    if met is None:
        if one.least == 0 and one.most is None:
            return spelling.any
        return _counted(one.least, one.most, rules, spelling)
    if met.empty():
        return None
    return f"{spelling.opening} {_states(met, rules, spelling)}"


def expression_grammar(pattern: str, never: str) -> str:
    """A grammar of the texts that one expression matches as a whole and in which the other is not found. Raises
    SchemaRefused."""
    met = checked((automaton(pattern, anchored=True) & automaton(never).everythingbut()).reduce())
    if met.empty():
        raise SchemaRefused("no text satisfies it", "pattern")
    rules = Rules()
    return rules.text(_states(met, rules, _TEXT))


def _counted(least: int, most: int | None, rules: Rules, spelling: Spelling) -> str:
    """Strings of `least` to `most` characters. Up to MOST_EXACT a rule counts each of them; of longer counts the
    characters that need no escape, in one repetition, which costs as much as a single rule."""
    opening, closing, plain = spelling.opening, spelling.closing, spelling.plain
    counted = least if most is None else most
    if counted > MOST_EXACT:
        if most is None:
            return f"{opening} {plain}{{{least}}} {spelling.rest}"
        return f"{opening} {plain}{{{least},{most}}} {closing}"
    tail = spelling.rest if most is None else closing
    for place in range(counted - 1, -1, -1):
        ways = [closing] if place >= least else []
        ways.append(f"{plain} {tail}")
        tail = rules.make("n", [*ways, f"escaped {tail}"] if spelling.escaped else ways)
    return f"{opening} {tail}"


def _states(made: FSM, rules: Rules, spelling: Spelling) -> str:
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
        written = [(_characters(made, symbols, spelling.escaped), target) for target, symbols in targets.items()]
        ways = sorted(written, key=itemgetter(0))
        branches = [spelling.closing] if state in made.finals else []
        for pieces, target in ways:
            branches += [f"{piece} {name(target)}" for piece in pieces]
        bodies[names[state]] = branches
    for rule, branches in bodies.items():
        rules.set(rule, branches)
    return names[made.initial]


def _characters(made: FSM, symbols: list[int], escaped: frozenset[str]) -> list[str]:
    """Expressions for one character of these symbols, some of which are written otherwise."""
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
        return [f"[^{_ranges(gone | escaped)}{_SURROGATES}]", *_written(escaped - gone)]
    plain = _ranges(listed - escaped)
    return [*([f"[{plain}]"] if plain else []), *_written(listed & escaped)]


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
