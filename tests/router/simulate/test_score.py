"""The search for the largest load that passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.simulate.score import MOST, score


@given(st.lists(st.integers(0, MOST), min_size=1, max_size=4), st.integers(1, MOST))
def test_the_score_is_the_least_of_the_seeds_whatever_the_guess(limits: list[int], guess: int) -> None:
    found = score(lambda steps, seed: steps <= limits[seed], list(range(len(limits))), guess)
    assert found.steps == min(limits)
    assert all(trial.passed == (trial.steps <= limits[trial.seed]) for trial in found.trials)


@pytest.mark.parametrize(("limit", "guess", "most"), [(93, 90, 6), (93, 93, 2), (85, 90, 6), (60, 90, 10)])
def test_few_runs_are_needed(limit: int, guess: int, most: int) -> None:
    found = score(lambda steps, seed: steps <= limit, [1], guess)
    assert len(found.trials) <= most
    same = score(lambda steps, seed: steps <= limit, [1, 2, 3], guess)
    assert len(same.trials) == len(found.trials) + 2, "further seeds begin at the score so far"
