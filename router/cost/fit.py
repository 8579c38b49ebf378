"""A few positive scale parameters, fitted online: recursive least squares with forgetting, robust to outliers.

Errors are relative (each observation is divided by its prediction), so long and short batches weigh the same. One
wild observation moves little: its weight falls with its distance, measured in the usual distance. When the usual
distance itself changes, a few observations suffice. Parameters stay within bounds around their priors.

In plain floats: of three parameters numpy's calls cost several times the arithmetic, and every step of every rank comes
through here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

Vector = Sequence[float]
TRUSTED = 2.0
"""Distances up to this many times the usual one have full weight (Huber's function)."""
NOTICED = 4.0
"""Larger ones count as this many usual ones in the usual distance, so that it grows by a quarter at most."""
SLOWNESS = 0.08
"""How fast the usual distance follows."""
NOISE = 0.1
"""Relative; what prior standard deviations are compared with."""
LEAST_DISTANCE = 0.02
"""Relative; smaller differences are noise."""


class ScaleFit:
    """y ≈ Σ θᵢ·xᵢ, θ starting at its prior."""

    def __init__(
        self,
        prior: Sequence[float],
        *,
        sureness: Sequence[float] | None = None,
        forgetting: float = 0.98,
        least: float = 0.0,
        most: float = 1e4,
    ) -> None:
        """`sureness`: prior standard deviation of each parameter, default 3. `least` and `most` bound every parameter.
        `forgetting`: weight of an observation falls by this factor with each further one."""
        if not 0.5 < forgetting <= 1 or not 0 <= least <= most:
            raise ValueError(f"forgetting {forgetting} must be in (0.5, 1] and bounds {least}, {most} in order")
        self._theta = [float(one) for one in prior]
        deviations = [3.0] * len(prior) if sureness is None else sureness
        self._most_variance = [(deviation / NOISE) ** 2 for deviation in deviations]
        self._covariance = [
            [variance if row == column else 0.0 for column in range(len(prior))]
            for row, variance in enumerate(self._most_variance)
        ]
        self._forgetting = forgetting
        self._least, self._most = least, most
        self._distance = 1.0
        self.observations = 0

    @property
    def theta(self) -> tuple[float, ...]:
        """The parameters now."""
        return tuple(self._theta)

    def predict(self, features: Sequence[float]) -> float:
        """Σ θᵢ·xᵢ."""
        return _dot(self._theta, features)

    def observe(self, features: Sequence[float], value: float) -> bool:
        """Learn from one observation. False: it was no finite positive number, or nothing is predicted for it."""
        predicted = self.predict(features)
        if not (math.isfinite(value) and value > 0 and all(map(math.isfinite, features)) and predicted > 0):
            return False
        # Relative to the larger of the two: else a prior that is far too low would see endless distances.
        scale = max(predicted, value)
        x = [feature / scale for feature in features]
        error = (value - predicted) / scale
        usual = self._distance
        weight = min(1.0, TRUSTED * usual / max(abs(error), 1e-12))
        self._distance += SLOWNESS * (min(abs(error), NOTICED * usual) - usual)
        self._distance = max(LEAST_DISTANCE, self._distance)
        self._update(x, error, self._forgetting / weight)
        self.observations += 1
        return True

    def _update(self, x: Vector, error: float, noise: float) -> None:
        """Move along the covariance. A parameter that would leave its bounds keeps its value and the others explain
        the error alone: merely cutting it off would leave their part of the move, in whatever direction that is."""
        every = range(len(x))
        used = list(x)
        bound: set[int] = set()
        while True:
            spread = [0.0 if i in bound else _dot(self._covariance[i], used) for i in every]
            total = noise + _dot(x, spread)
            gain = [one / total for one in spread]
            moved = [theta + one * error for theta, one in zip(self._theta, gain, strict=True)]
            out = {i for i in every if i not in bound and not self._least <= moved[i] <= self._most}
            if not out:
                break
            bound |= out
            used = [0.0 if i in bound else x[i] for i in every]
        self._theta = moved
        # Joseph's form, (1 − g xᵀ) C (1 − g xᵀ)ᵀ + noise · g gᵀ, which stays positive for any gain.
        kept = [[float(i == j) - gain[i] * x[j] for j in every] for i in every]
        half = [[_dot(row, column) for column in self._covariance] for row in kept]  # C is symmetric
        covariance = [
            [(_dot(half[i], kept[j]) + noise * gain[i] * gain[j]) / self._forgetting for j in every] for i in every
        ]
        # Without news of one parameter, forgetting alone would make its variance grow for ever.
        excess = [math.sqrt(max(1.0, covariance[i][i] / self._most_variance[i])) for i in every]
        self._covariance = [[covariance[i][j] / (excess[i] * excess[j]) for j in every] for i in every]


def _dot(one: Vector, other: Vector) -> float:
    total: float = sum(map(mul, one, other))
    return total
