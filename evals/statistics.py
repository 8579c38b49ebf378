"""Accuracy of a run by subset, with its interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

Z95: Final = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
RESAMPLES: Final = 10_000
_CHUNK: Final = 2_000_000
TOTAL: Final = "all"


@dataclass(frozen=True)
class Interval:
    """Of 95 % confidence."""

    low: float
    high: float
    method: str


def wilson(correct: int, total: int) -> Interval:
    """Wilson's score interval of a proportion (1927), for independent answers.

    >>> wilson(8, 10)
    Interval(low=0.49015684672072346, high=0.9433178485456247, method='wilson')
    """
    if not 0 <= correct <= total or not total:
        raise ValueError(f"{correct} of {total} is no proportion")
    share, weight = correct / total, Z95 * Z95 / total
    middle = (share + weight / 2) / (1 + weight)
    half = Z95 / (1 + weight) * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    # Rounding may step over the ends, and over the share where that is 0 or 1.
    return Interval(max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)), "wilson")


def bootstrap(by_item: Sequence[float]) -> Interval:
    """Percentile bootstrap over items, with a fixed seed: answers to one question are alike, so questions are drawn.

    `by_item` holds each question's mean over its answers."""
    values = np.asarray(by_item, dtype=np.float64)
    if not values.size:
        raise ValueError("no items")
    generator = np.random.default_rng(0)
    means: list[np.ndarray] = []
    rows = max(1, _CHUNK // values.size)
    for begin in range(0, RESAMPLES, rows):
        drawn = generator.integers(0, values.size, (min(rows, RESAMPLES - begin), values.size))
        means.append(values[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Interval(float(low), float(high), "bootstrap over items")


@dataclass
class Row:
    """One subset, or all."""

    subset: str
    items: int
    answers: int
    correct: int
    accuracy: float | None
    """Mean over items of the mean over their answers; None without graded answers."""
    interval: Interval | None
    no_answer: int
    """Graded wrong, since the text names no answer."""
    cut: int
    """Ended by max_tokens."""
    missing: int
    """Asked for and not there, or not graded; not in the accuracy."""


@dataclass
class _Gathered:
    marks: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    no_answer: int = 0
    cut: int = 0
    missing: int = 0


def summarise(grades: Sequence[Mapping[str, object]]) -> list[Row]:
    """Rows by subset, in order of appearance, the total last. A grade has `item`, `subset`, `correct` (None: missing),
    `extracted`, `finish_reason`."""
    gathered: dict[str, _Gathered] = {}
    for grade in grades:
        for subset in (str(grade["subset"]), TOTAL):
            into = gathered.setdefault(subset, _Gathered())
            if grade["correct"] is None:
                into.missing += 1
                continue
            into.marks[str(grade["item"])].append(bool(grade["correct"]))
            into.no_answer += not grade["correct"] and not grade["extracted"]
            into.cut += grade["finish_reason"] == "length"
    total = gathered.pop(TOTAL, _Gathered())
    return [_row(subset, one) for subset, one in [*gathered.items(), (TOTAL, total)]]


def _row(subset: str, found: _Gathered) -> Row:
    answers = [mark for marks in found.marks.values() for mark in marks]
    means = [sum(marks) / len(marks) for marks in found.marks.values()]
    interval = None
    if answers:
        once = len(answers) == len(means)
        interval = wilson(sum(answers), len(answers)) if once else bootstrap(means)
    return Row(
        subset=subset,
        items=len(means),
        answers=len(answers),
        correct=sum(answers),
        accuracy=sum(means) / len(means) if means else None,
        interval=interval,
        no_answer=found.no_answer,
        cut=found.cut,
        missing=found.missing,
    )
