"""A few positive scale parameters, fitted online: recursive least squares with forgetting, robust to outliers.

Errors are relative (each observation is divided by its prediction), so long and short batches weigh the same. One
wild observation moves little: its weight falls with its distance, measured in the usual distance. When the usual
distance itself changes, a few observations suffice. Parameters stay within bounds around their priors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
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
        self._theta: Floats = np.array(prior, np.float64)
        deviations = np.full(len(prior), 3.0) if sureness is None else np.array(sureness, np.float64)
        self._most_variance = (deviations / NOISE) ** 2
        self._covariance: Floats = np.diag(self._most_variance)
        self._forgetting = forgetting
        self._least, self._most = least, most
        self._distance = 1.0
        self.observations = 0

    @property
    def theta(self) -> tuple[float, ...]:
        """The parameters now."""
        return tuple(self._theta.tolist())

    def predict(self, features: Sequence[float]) -> float:
        """Σ θᵢ·xᵢ."""
        return float(np.dot(self._theta, features))

    def observe(self, features: Sequence[float], value: float) -> bool:
        """Learn from one observation. False: it was no finite positive number, or nothing is predicted for it."""
        x = np.array(features, np.float64)
        predicted = float(self._theta @ x)
        if not (math.isfinite(value) and value > 0 and np.isfinite(x).all() and predicted > 0):
            return False
        # Relative to the larger of the two: else a prior that is far too low would see endless distances.
        scale = max(predicted, value)
        x /= scale
        error = (value - predicted) / scale
        usual = self._distance
        weight = min(1.0, TRUSTED * usual / max(abs(error), 1e-12))
        self._distance += SLOWNESS * (min(abs(error), NOTICED * usual) - usual)
        self._distance = max(LEAST_DISTANCE, self._distance)
        self._update(x, error, self._forgetting / weight)
        self.observations += 1
        return True

    def _update(self, x: Floats, error: float, noise: float) -> None:
        """Move along the covariance. A parameter that would leave its bounds keeps its value and the others explain
        the error alone: merely cutting it off would leave their part of the move, in whatever direction that is."""
        free = np.ones(len(x), np.bool_)
        while True:
            spread = np.where(free, self._covariance @ np.where(free, x, 0.0), 0.0)
            gain = spread / (noise + float(x @ spread))
            moved = self._theta + gain * error
            out = free & ((moved < self._least) | (moved > self._most))
            if not out.any():
                break
            free &= ~out
        self._theta = moved
        # Joseph's form, which stays positive for any gain.
        kept = np.eye(len(x)) - np.outer(gain, x)
        covariance = (kept @ self._covariance @ kept.T + noise * np.outer(gain, gain)) / self._forgetting
        # Without news of one parameter, forgetting alone would make its variance grow for ever.
        excess = np.sqrt(np.maximum(1.0, np.diag(covariance) / self._most_variance))
        self._covariance = covariance / np.outer(excess, excess)
