"""How much slower than its peers each rank answers."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


ANSWER_S = 0.1
"""How long an answer is used again."""
NOISE = 0.2
"""Differences below this, in the logarithm, are noise of the machine: decode would follow them altogether."""


class Slowness:
    """A factor by rank number: observed ÷ predicted time, smoothed in its logarithm, 1 for a rank like the others.

    Relative to the mean of the ranks that are observed: what all of them show is the model's error, which the fit of
    its curve takes out. Taken alone it would draw everything to, or drive everything from, whoever was observed first
    (L21): with two decode ranks ten times slower than the prior, 95 of 98 requests went to the one nobody knew. A rank
    that was never observed is like the mean. It decays to 1 within a minute when nothing is observed, so that a rank
    which was slow and gets nothing is tried again (L14): decode prefers the fastest pace, whatever the difference.
    """

    def __init__(
        self, *, follow: float = 0.2, half_life_s: float = 15.0, least: float = 0.5, most: float = 16.0
    ) -> None:
        self._follow = follow
        self._half_life_s = half_life_s
        self._bounds = math.log(least), math.log(most)
        self._logs: Floats = np.zeros(0)
        self._seen: Floats = np.full(0, -math.inf)
        self._last: tuple[Ints, float, Floats] | None = None
        """Answer to the last question: numbers, until when it is good, factors."""

    def observe(self, number: int, ratio: float, now: float) -> None:
        """Observed ÷ predicted of one piece of work. Absurd ratios are not believed."""
        if not (math.isfinite(ratio) and ratio > 0):
            return
        self._grow(number + 1)
        low, high = self._bounds
        log = min(max(math.log(ratio), low), high)
        if math.isinf(self._seen[number]):
            # A newcomer's first word counts like anybody's: from the mean on, not from the model.
            self._logs[number] = self._mean(np.arange(len(self._logs)), now)
        self._logs[number] += self._follow * (log - self._logs[number])
        self._seen[number] = now

    def factors(self, numbers: Ints, now: float) -> Floats:
        """Of these ranks. An answer for the same array is good for a while: nothing here changes faster."""
        last = self._last
        if last is not None and last[0] is numbers and last[1] - ANSWER_S <= now <= last[1]:
            return last[2]
        self._grow(int(numbers.max(initial=-1)) + 1)
        relative = self._logs[numbers] - self._mean(numbers, now)
        relative = relative * self._left(now - self._seen[numbers])
        relative[np.abs(relative) < NOISE] = 0.0
        result: Floats = np.exp(relative)
        result.flags.writeable = False
        self._last = numbers, now + ANSWER_S, result
        return result

    def clear(self, number: int) -> None:
        """The number is another rank's now."""
        self._last = None
        if number < len(self._logs):
            self._logs[number] = 0.0
            self._seen[number] = -math.inf

    def _mean(self, numbers: Ints, now: float) -> float:
        """Of the logarithms, the freshest counting most; 0 where none of these ranks was observed."""
        weights = self._left(now - self._seen[numbers])
        total = float(weights.sum())
        return float(weights @ self._logs[numbers]) / total if total > 0 else 0.0

    def _left(self, ages: Floats | float) -> Floats:
        result: Floats = np.asarray(0.5 ** (np.maximum(0.0, ages) / self._half_life_s))
        return result

    def _grow(self, size: int) -> None:
        missing = size - len(self._logs)
        if missing > 0:
            more = max(missing, len(self._logs), 8)
            self._logs = np.concatenate((self._logs, np.zeros(more)))
            self._seen = np.concatenate((self._seen, np.full(more, -math.inf)))
