"""router.cost.fit in plain floats, against the textbook in matrices."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.cost.fit import NOISE, ScaleFit

FEATURES = st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3)


@given(st.lists(FEATURES, min_size=1, max_size=30))
def test_it_is_recursive_least_squares(seen: list[list[float]]) -> None:
    """Exact observations, so that no weight falls: θ is what the normal equations with forgetting and the prior say."""
    true = np.array([2.0, 1.5, 3.0])
    fit = ScaleFit((1.0, 1.0, 1.0), forgetting=1.0)
    information = np.eye(3) / (3.0 / NOISE) ** 2
    target = information @ np.ones(3)
    for features in seen:
        x, value = np.array(features), float(true @ features)
        scale = max(fit.predict(features), value)
        usual = fit._distance
        error = (value - fit.predict(features)) / scale
        weight = min(1.0, 2.0 * usual / max(abs(error), 1e-12))
        assert fit.observe(features, value)
        information += weight * np.outer(x, x) / scale**2
        target += weight * x * value / scale**2
        expected = np.linalg.solve(information, target)
        if expected.min() <= 0:
            return  # a bound: the others explain the error alone from here on
        np.testing.assert_allclose(fit.theta, expected, rtol=1e-6, atol=1e-6)
