"""Answers, and where two of them differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GREEDY_LOGPROBS = 2
"""Greedy answers ask for the two likeliest tokens, so that a difference can be shown with its margin."""


@dataclass(frozen=True)
class ChoiceAnswer:
    """One finished choice."""

    token_ids: tuple[int, ...]
    text: str
    reason: str
    """`stop`, `length` …"""
    logprobs: tuple[float, ...] = ()
    """Of the chosen tokens, where they were asked for."""
    margins: tuple[float, ...] = ()
    """Log-probability of the likeliest token less that of the second."""


@dataclass(frozen=True)
class Answer:
    """What one way gave for one request."""

    choices: tuple[ChoiceAnswer, ...]
    cached_tokens: int = 0


Answers = Mapping[str, Answer]
"""By request name: `greedy:CASE` or `sampled:CASE`."""


@dataclass(frozen=True)
class Difference:
    """The first place where two answers to one request differ."""

    request: str
    pair: str
    """The two ways, e.g. `offline-1 = cluster-8`."""
    choice: int
    position: int
    """Index of the first differing token in the answer, or the shorter answer's length."""
    what: str
    margin: float | None
    """Log-probability margin between the two likeliest tokens there (greedy only)."""


@dataclass
class PairResult:
    """Comparisons between two ways."""

    pair: str
    compared: int = 0
    equal: int = 0
    tokens: int = 0
    """Tokens that were compared."""
    same_logprobs: int = 0
    """Requests whose log-probabilities are the same bits; told, not required."""
    with_logprobs: int = 0
    differences: list[Difference] = field(default_factory=list)


def compare(left: str, right: str, a: Answers, b: Answers, names: Sequence[str], *, text: bool = True) -> PairResult:
    """Compare the named requests of two ways. A request that one way lacks is a difference. `text`: compare also the
    texts and the reasons, not the tokens alone."""
    result = PairResult(f"{left} = {right}")
    for name in names:
        result.compared += 1
        if name not in a or name not in b:
            lacking = left if name not in a else right
            result.differences.append(Difference(name, result.pair, 0, 0, f"{lacking} gave no answer", None))
            continue
        difference = _first_difference(name, result.pair, a[name], b[name], text=text)
        if difference is not None:
            result.differences.append(difference)
            continue
        result.equal += 1
        result.tokens += sum(len(choice.token_ids) for choice in a[name].choices)
        if all(choice.logprobs for choice in (*a[name].choices, *b[name].choices)):
            result.with_logprobs += 1
            same = all(x.logprobs == y.logprobs for x, y in zip(a[name].choices, b[name].choices, strict=True))
            result.same_logprobs += same
    return result


def _first_difference(name: str, pair: str, a: Answer, b: Answer, *, text: bool) -> Difference | None:
    if len(a.choices) != len(b.choices):
        return Difference(name, pair, 0, 0, f"{len(a.choices)} and {len(b.choices)} choices", None)
    for index, (x, y) in enumerate(zip(a.choices, b.choices, strict=True)):
        place = first_different(x.token_ids, y.token_ids)
        if place is not None:
            margins = x.margins or y.margins
            margin = margins[place] if place < len(margins) else None
            what = f"token {_at(x.token_ids, place)} and {_at(y.token_ids, place)}"
            return Difference(name, pair, index, place, what, margin)
        if text and x.reason != y.reason:
            return Difference(name, pair, index, len(x.token_ids), f"ended by {x.reason} and {y.reason}", None)
        if text and x.text != y.text:
            return Difference(name, pair, index, len(x.token_ids), f"text {x.text!r} and {y.text!r}", None)
    return None


def first_different(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference; the shorter length if one continues the other; None if they are equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def _at(tokens: Sequence[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "nothing"
