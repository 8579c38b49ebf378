"""A language that a choice's output must belong to, in one of the three forms that a grammar compiler reads.

JSON Schemas, JSON objects and lists of choices become grammars here, exactly or not at all; expressions, grammars and
structural tags are checked as far as that goes without compiling them. All of it is done without torch, so that a
router refuses at once. Everything raises ConstraintRefused (or SchemaRefused) with the reason.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.text.errors import TextError
from headrace.engine.text.json_schema.compile import schema_grammar
from headrace.engine.text.json_schema.ebnf import quoted
from headrace.engine.text.json_schema.patterns import stray_anchor

MOST_REGEX_BYTES = 4 * 1024
MOST_GRAMMAR_BYTES = 64 * 1024
"""Of a grammar that a client has written. One that a schema becomes may be longer."""
MOST_CHOICES, MOST_CHOICES_BYTES = 1024, 64 * 1024
MOST_AFTER = 64
"""Tokens of the mark behind which a language begins."""
MOST_TEXT_BYTES = 4 * 1024 * 1024
"""Of anything that is compiled."""


class ConstraintRefused(TextError):
    """A language that is wrong, too large, or that cannot be enforced."""


class Language(enum.Enum):
    """What the text of a constraint is written in."""

    GRAMMAR = "grammar"
    """EBNF as xgrammar reads it; the root rule is `root`."""
    REGEX = "regex"
    """An ECMA-262 expression that the whole output matches."""
    STRUCTURAL_TAG = "structural_tag"
    """xgrammar's JSON notation of free text with constrained parts."""


@dataclass(frozen=True)
class Constraint:
    """What an engine enforces on every choice of a request."""

    language: Language
    text: str
    after: tuple[int, ...] = ()
    """The language begins behind these tokens, the first time that they are generated in a row; up to there everything
    but an end of the output is allowed. Empty: it begins at once."""


def from_schema(schema: str) -> Constraint:
    """The compact JSON texts of a schema's instances. Raises SchemaRefused."""
    return Constraint(Language.GRAMMAR, schema_grammar(schema))


def json_object() -> Constraint:
    """Any JSON object."""
    return from_schema('{"type":"object"}')


def from_choices(values: Sequence[str]) -> Constraint:
    """One of these texts."""
    if not 1 <= len(values) <= MOST_CHOICES:
        raise ConstraintRefused(f"{len(values)} choices; 1 to {MOST_CHOICES} are taken")
    if not all(values):
        raise ConstraintRefused("a choice must not be empty")
    _check_size("".join(values), MOST_CHOICES_BYTES)
    return Constraint(Language.GRAMMAR, "root ::= " + " | ".join(quoted(value) for value in dict.fromkeys(values)))


def from_regex(pattern: str) -> Constraint:
    """What the expression matches as a whole; anchors at its ends change nothing."""
    _check_size(pattern, MOST_REGEX_BYTES)
    if stray_anchor(pattern):
        raise ConstraintRefused("an anchor inside the expression; the whole output is matched anyhow")
    return Constraint(Language.REGEX, pattern)


def from_grammar(text: str) -> Constraint:
    """A context-free grammar in EBNF."""
    _check_size(text, MOST_GRAMMAR_BYTES)
    return Constraint(Language.GRAMMAR, text)


def _check_size(text: str, most: int) -> None:
    size = len(text.encode())
    if not text.strip():
        raise ConstraintRefused("it is empty")
    if size > most:
        raise ConstraintRefused(f"{size} bytes; at most {most} are taken")
