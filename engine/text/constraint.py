"""A language that a choice's output must belong to, in one of the three forms that a grammar compiler reads.

How clients' forms become one stands in constraint_forms.py, which needs libraries that an engine does without.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from headrace.engine.text.errors import TextError

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
