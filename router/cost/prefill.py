"""What prefill costs: the work of a request, and how long a batch takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from headrace.router.cost.curves import Floats, Ints, Numbers, PrefillCurve, attention_pairs
from headrace.router.cost.fit import ScaleFit
from headrace.router.cost.slowness import Slowness

GRID_CALLS = 40
"""Longest prompt whose calls are told apart: 1.3 M tokens."""
GRID_STEPS = 16
"""Points of the grid in each call."""


class PrefillCosts(Protocol):
    """What the prefill balancer asks, over arrays with one entry per rank."""

    def work(self, new: Numbers, hit: Numbers) -> Floats:
        """Seconds of a busy rank that the request takes: its share of full batches. Adds up over requests."""
        ...

    def alone(self, new: Numbers, hit: Numbers) -> Floats:
        """Seconds until its first token on an idle rank, everything loaded."""
        ...

    def slowness(self, numbers: Ints, now: float) -> Floats:
        """By how much each rank is slower than its peers; 1 for all without reports."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """What a rank computes in one call. Terms may be means over batches, hence floats."""

    requests: float
    computed_tokens: float
    hit_tokens: float = 0.0
    """Σ over its requests of the tokens before those that were computed."""
    with_hit: float = 0.0
    """Share of requests with a hit."""
    hit_ratio: float = 0.0
    """Mean over requests of hit tokens ÷ prompt tokens."""
    attention: float = 0.0
    """Σ new · (hit + new/2), in pairs of tokens."""


@dataclass(frozen=True, slots=True)
class FixedPrefillCost:
    """So many seconds for each new token and nothing else: for replays without time."""

    token_s: float = 1e-5

    def work(self, new: Numbers, hit: Numbers) -> Floats:
        """Seconds, by new tokens alone."""
        return np.asarray(new, np.float64) * self.token_s

    def alone(self, new: Numbers, hit: Numbers) -> Floats:
        """The same."""
        return self.work(new, hit)

    def slowness(self, numbers: Ints, now: float) -> Floats:
        """All alike."""
        return np.ones(len(numbers))


class WorkTerms(NamedTuple):
    """The cost of one request written out: coefficients of what it computes and of what it has cached."""

    per_new: float
    """Seconds of work for each new token."""
    per_hit: float
    """For each cached one."""
    per_pair: float
    """For each pair of tokens; of `alone`, too."""
    curve: float
    """`alone`: scale of the grid."""
    alone_per_new: float
    """Beside the grid."""

    def work(self, new: int, hit: int) -> float:
        """`PrefillCost.work` of one request at one rank."""
        return new * self.per_new + hit * self.per_hit + self.per_pair * (new * (hit + new / 2))


class PrefillCost:
    """seconds of a batch ≈ θ₀ · curve + θ₁ · computed tokens · token_s + θ₂ · pairs of tokens · pair_s.

    θ starts at (1, 0, 0): the curve as published. Engines of another kind (a small model on a CPU, whose time is
    proportional to tokens) move it to the other terms within some tens of batches.
    """

    PAIR_S = 1e-9
    """Unit of the attention term."""

    def __init__(
        self,
        curve: PrefillCurve | None = None,
        *,
        batch_tokens: int = 32_768,
        batch_requests: float = 4.0,
        slowness: Slowness | None = None,
    ) -> None:
        """`batch_tokens`: most that one call computes; `batch_requests`: usual requests of a full one."""
        self._curve = curve or PrefillCurve()
        self._batch_tokens = batch_tokens
        self._batch_requests = batch_requests
        self._slowness = slowness or Slowness()
        self._full_s = float(self._curve.seconds(batch_requests, batch_tokens))
        self._token_s = self._full_s / batch_tokens
        self.grid_step = batch_tokens / GRID_STEPS
        self._grid: Floats = np.arange(0, GRID_CALLS * batch_tokens + 1, self.grid_step)
        self.grid_s = self._calls(self._grid)
        """Seconds of a prompt alone by the curve, every `grid_step` tokens from 0 on."""
        self.grid_s[0] = self.grid_s[1]
        self.fit = ScaleFit((1.0, 0.0, 0.0), sureness=(3.0, 100.0, 3.0))
        self._terms: tuple[int, WorkTerms] | None = None

    @property
    def terms(self) -> WorkTerms:
        """As of the last observation."""
        if self._terms is None or self._terms[0] != self.fit.observations:
            curve, token, pair = self.fit.theta
            terms = WorkTerms(
                per_new=(curve + token) * self._token_s,
                per_hit=curve * self._curve.per_hit / 1000,
                per_pair=curve * self._curve.attention / 1000 + pair * self.PAIR_S,
                curve=curve,
                alone_per_new=token * self._token_s,
            )
            self._terms = self.fit.observations, terms
        return self._terms[1]

    @property
    def hit_ms(self) -> tuple[float, float]:
        """What a hit adds at most, over the curve's floor or under it: for each token, and for having one."""
        return self._curve.per_hit, self._curve.with_hit + self._curve.hit_ratio

    def work(self, new: Numbers, hit: Numbers) -> Floats:
        """Seconds: its share of a full batch, and what its hit tokens and attention add to it."""
        terms = self.terms
        computed = np.asarray(new, np.float64)
        seconds: Floats = computed * terms.per_new
        seconds = seconds + np.asarray(hit) * terms.per_hit
        return seconds + terms.per_pair * attention_pairs(computed, hit) if terms.per_pair else seconds

    def alone(self, new: Numbers, hit: Numbers) -> Floats:
        """Seconds of as many calls as it needs. Between the points of a grid the curve is a straight line."""
        terms = self.terms
        computed, cached = np.asarray(new, np.float64), np.asarray(hit, np.float64)
        seconds: Floats = np.interp(computed, self._grid, self.grid_s) * terms.curve
        if terms.alone_per_new:
            seconds = seconds + computed * terms.alone_per_new
        if terms.per_pair:
            seconds = seconds + terms.per_pair * attention_pairs(computed, cached)
        per_hit, with_hit = self.hit_ms
        added: Floats = (cached * per_hit + with_hit * (cached > 0)) * (terms.curve / 1000)
        return seconds + added

    def _calls(self, tokens: Floats) -> Floats:
        """Seconds by the curve of as many full batches as there are, and the rest."""
        whole = np.floor(tokens / self._batch_tokens)
        rest = tokens - whole * self._batch_tokens
        last = np.where(rest > 0, self._curve.seconds(1.0, rest), 0.0)
        return whole * self._curve.seconds(1.0, self._batch_tokens) + last

    def slowness(self, numbers: Ints, now: float) -> Floats:
        """By rank."""
        return self._slowness.factors(numbers, now)

    def predict(self, batch: PrefillBatch) -> float:
        """Seconds of a batch."""
        return self.fit.predict(self._features(batch))

    def observe(self, number: int, batch: PrefillBatch, seconds: float, now: float) -> None:
        """A rank computed that batch in so long."""
        if batch.computed_tokens <= 0 or batch.requests <= 0:
            return
        features = self._features(batch)
        predicted = self.fit.predict(features)
        if self.fit.observe(features, seconds) and predicted > 0:
            self._slowness.observe(number, seconds / predicted, now)

    def clear(self, number: int) -> None:
        """The number is another rank's now."""
        self._slowness.clear(number)

    def _features(self, batch: PrefillBatch) -> tuple[float, float, float]:
        curve = self._curve.seconds(
            batch.requests, batch.computed_tokens, batch.hit_tokens, batch.with_hit, batch.hit_ratio, batch.attention
        )
        return float(curve), batch.computed_tokens * self._token_s, batch.attention * self.PAIR_S
