"""What clients ask for, as constraints: schemas, objects, choices, expressions, grammars.

JSON Schemas, JSON objects and lists of choices become grammars here, exactly or not at all; expressions and grammars
are checked as far as that goes without compiling them. All of it is done without torch, so that a router refuses at
once. Everything raises ConstraintRefused (or SchemaRefused) with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.text.constraint import Constraint, ConstraintRefused, Language
from headrace.engine.text.json_schema.compile import schema_grammar
from headrace.engine.text.json_schema.ebnf import quoted
from headrace.engine.text.json_schema.patterns import stray_anchor

MOST_REGEX_BYTES = 4 * 1024
MOST_GRAMMAR_BYTES = 64 * 1024
"""Of a grammar that a client has written. One that a schema becomes may be longer."""
MOST_CHOICES, MOST_CHOICES_BYTES = 1024, 64 * 1024


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
