"""Throughput ÷ perfectly balanced offline: the largest load at which a router keeps the objectives, for all seeds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

STEP = 0.01
"""Loads are tried in steps of this share of the offline rate."""
LEAST, MOST = 1, 120
"""In steps."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the search."""

    steps: int
    seed: int
    passed: bool


@dataclass(frozen=True, slots=True)
class Score:
    """`steps`: the largest load that passes with every seed, 0 for none; `by_seed`: the largest that was seen to pass
    with each (a seed that passed where another failed is not pushed further)."""

    steps: int
    by_seed: dict[int, int]
    trials: tuple[Trial, ...]

    @property
    def load(self) -> float:
        return round(self.steps * STEP, 2)


Search = Generator[tuple[int, int], bool, Score]
"""Yields (steps, seed) to be run, is sent whether it passed, returns the score."""


def search(seeds: Sequence[int], guess: int = 90) -> Search:
    """From the guess in doubling strides until the score is bracketed, then halving; further seeds begin where the last
    one ended, since the score is the least of them. A guess that is right costs a pass and the fail one step above it,
    and a pass for each further seed. Passing is taken as monotone in the load: what passes at a load passes below it.
    """
    trials: list[Trial] = []
    best, by_seed = MOST, dict[int, int]()
    for seed in seeds:
        most = best
        good, bad, stride = 0, most + 1, 1
        at = max(LEAST, min(guess, most))
        while bad - good > 1:
            passed = yield at, seed
            trials.append(Trial(at, seed, passed))
            good, bad = (at, bad) if passed else (good, at)
            if good and bad <= most:
                at = (good + bad) // 2
                continue
            at = min(most, good + stride) if good else max(LEAST, bad - stride)
            stride *= 2
        best = by_seed[seed] = guess = good
        if best == 0:
            break
    return Score(best, by_seed, tuple(trials))


def score(passes: Callable[[int, int], bool], seeds: Sequence[int], guess: int = 90) -> Score:
    """Search by calling `passes(steps, seed)`."""
    searching = search(seeds, guess)
    try:
        asked = next(searching)
        while True:
            asked = searching.send(passes(*asked))
    except StopIteration as end:
        found: Score = end.value
        return found
