"""Intervals and summaries."""

from __future__ import annotations

import math
import random

import pytest

from headrace.evals.statistics import TOTAL, bootstrap, summarise, wilson


@pytest.mark.parametrize(("correct", "total"), [(0, 10), (8, 10), (10, 10), (1, 1), (500, 1000)])
def test_wilson_solves_its_equation(correct: int, total: int) -> None:
    """Its ends are the p at which the observed share lies 1.96 standard errors of p away (the plain definition)."""
    interval = wilson(correct, total)
    share = correct / total
    assert 0 <= interval.low <= share <= interval.high <= 1
    for end in (interval.low, interval.high):
        if 1e-9 < end < 1 - 1e-9:
            assert abs(share - end) / math.sqrt(end * (1 - end) / total) == pytest.approx(1.959964, abs=1e-5)


def test_wilson_of_a_worked_example() -> None:
    interval = wilson(8, 10)
    assert (interval.low, interval.high) == (pytest.approx(0.490, abs=1e-3), pytest.approx(0.943, abs=1e-3))
    with pytest.raises(ValueError, match="no proportion"):
        wilson(3, 2)


def test_bootstrap_is_repeatable_and_close_to_the_normal_interval() -> None:
    drawn = random.Random(1)
    values = [drawn.random() for _ in range(400)]
    interval = bootstrap(values)
    assert interval == bootstrap(values)
    mean = sum(values) / len(values)
    half = 1.96 * math.sqrt(sum((value - mean) ** 2 for value in values)) / len(values)
    assert interval.low == pytest.approx(mean - half, abs=0.004)
    assert interval.high == pytest.approx(mean + half, abs=0.004)


def grade(item: str, subset: str, correct: bool | None, *, reason: str = "stop", found: str = "x") -> dict[str, object]:
    return {"item": item, "subset": subset, "correct": correct, "extracted": found, "finish_reason": reason}


def test_rows_by_subset() -> None:
    one, two, total = summarise([
        grade("a", "one", True),
        grade("b", "one", False, reason="length", found=""),
        grade("c", "two", True),
        grade("d", "two", None),
    ])  # fmt: skip
    assert (one.subset, one.items, one.correct, one.accuracy, one.no_answer, one.cut) == ("one", 2, 1, 0.5, 1, 1)
    assert (two.items, two.accuracy, two.missing) == (1, 1.0, 1)
    assert (total.subset, total.items, total.correct, total.missing) == (TOTAL, 3, 2, 1)
    assert total.interval == wilson(2, 3)


def test_repeats_count_by_item() -> None:
    """Four answers to one question are not four questions: the interval is over items."""
    grades = [grade(str(item), "s", item % 2 == 0) for item in range(20) for _ in range(4)]
    row = summarise(grades)[-1]
    assert (row.items, row.answers, row.accuracy) == (20, 80, 0.5)
    assert row.interval is not None
    assert row.interval.method == "bootstrap over items"
    plain = wilson(40, 80)
    assert row.interval.high - row.interval.low > 1.5 * (plain.high - plain.low)


def test_nothing_graded() -> None:
    (total,) = summarise([])
    assert (total.items, total.accuracy, total.interval) == (0, None, None)
