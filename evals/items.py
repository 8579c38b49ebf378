"""One question of a data set, with all that is needed to ask and to grade it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from headrace.evals.errors import EvalError

Rule = Literal["boxed_integer", "letter", "number", "exact", "json", "checks", "judge"]
"""How an answer is graded (grading.py)."""
RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True)
class Turn:
    """One message of the prompt. Images stand before the text."""

    role: str
    text: str
    images: tuple[str, ...] = ()
    """Data URLs."""


@dataclass(frozen=True)
class Check:
    """One constraint on an answer's form (constraints.py)."""

    kind: str
    value: str | int = ""
    count: int = 0


@dataclass(frozen=True)
class Item:
    """A question."""

    identifier: str
    """Unique in its set."""
    subset: str
    turns: tuple[Turn, ...]
    rule: Rule
    answer: str = ""
    """The reference: a number, a letter, a text, or a JSON document."""
    checks: tuple[Check, ...] = ()
    question: str = ""
    """For a judge: the question without instructions on form."""


def to_entry(item: Item) -> dict[str, Any]:
    """As a JSON object."""
    return asdict(item)


def from_entry(entry: Mapping[str, Any]) -> Item:
    """The item of a JSON object that `to_entry` made. Raises EvalError."""
    try:
        if entry["rule"] not in RULES:
            raise EvalError(f"item {entry['identifier']!r}: there is no rule {entry['rule']!r}")
        turns = tuple(Turn(turn["role"], turn["text"], tuple(turn["images"])) for turn in entry["turns"])
        checks = tuple(Check(**check) for check in entry["checks"])
        return Item(
            identifier=str(entry["identifier"]),
            subset=str(entry["subset"]),
            turns=turns,
            rule=cast(Rule, entry["rule"]),
            answer=str(entry["answer"]),
            checks=checks,
            question=str(entry["question"]),
        )
    except (KeyError, TypeError) as error:
        raise EvalError(f"no item: {error}") from error
