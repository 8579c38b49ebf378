"""What decode costs: how long a rank's step takes with so many requests and KV tokens."""

from __future__ import annotations

from typing import Protocol

from headrace.router.cost.curves import DecodeCurve, Floats, Ints, Numbers
from headrace.router.cost.fit import ScaleFit
from headrace.router.cost.slowness import Slowness

SETTLED_STEPS = 50
"""Before, what a step took beyond its prediction is the prior's error, and would be taken for its rank's slowness."""


class DecodeCosts(Protocol):
    """What the decode balancer asks, over arrays with one entry per rank."""

    def step(self, requests: Numbers, kv_tokens: Numbers) -> Floats:
        """Seconds of a step."""
        ...

    def slowness(self, numbers: Ints, now: float) -> Floats:
        """By how much each rank is slower than its peers."""
        ...


class DecodeCost:
    """seconds ≈ θ₀ · base + θ₁ · per_request · requests + θ₂ · per_token · KV tokens; θ starts at 1."""

    def __init__(self, curve: DecodeCurve | None = None, slowness: Slowness | None = None) -> None:
        self._curve = curve or DecodeCurve()
        self._slowness = slowness or Slowness()
        self._steps = 0
        self.fit = ScaleFit((1.0, 1.0, 1.0), least=1e-3)
        self._scaled: tuple[int, DecodeCurve] | None = None

    @property
    def scaled(self) -> DecodeCurve:
        """The curve as of the last observation."""
        if self._scaled is None or self._scaled[0] != self.fit.observations:
            base, request, token = self.fit.theta
            curve = self._curve
            self._scaled = (
                self.fit.observations,
                DecodeCurve(base * curve.base, request * curve.per_request, token * curve.per_token),
            )
        return self._scaled[1]

    def step(self, requests: Numbers, kv_tokens: Numbers) -> Floats:
        """Seconds."""
        return self.scaled.seconds(requests, kv_tokens)

    def slowness(self, numbers: Ints, now: float) -> Floats:
        """By rank."""
        return self._slowness.factors(numbers, now)

    def observe(self, number: int, requests: int, kv_tokens: int, seconds: float, now: float) -> None:
        """A rank's step took so long."""
        if requests <= 0:
            return
        curve = self._curve
        features = (curve.base / 1000, curve.per_request * requests / 1000, curve.per_token * kv_tokens / 1000)
        predicted = self.fit.predict(features)
        if self.fit.observe(features, seconds) and predicted > 0:
            self._steps += 1
            if self._steps > SETTLED_STEPS:
                self._slowness.observe(number, seconds / predicted, now)

    def clear(self, number: int) -> None:
        """The number is another rank's now."""
        self._slowness.clear(number)
