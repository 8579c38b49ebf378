"""router.cost: priors as the spec gives them, and fits that find the truth, forget it, and are not fooled."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.cost.curves import DecodeCurve, PrefillCurve, attention_pairs, softplus
from headrace.router.cost.decode import DecodeCost
from headrace.router.cost.fit import ScaleFit
from headrace.router.cost.loading import LoadingRates, Source
from headrace.router.cost.prefill import PrefillBatch, PrefillCost
from headrace.router.cost.slowness import Slowness


def test_priors_are_those_of_the_spec() -> None:
    curve = PrefillCurve()
    assert float(curve.seconds(1, 500)) == 0.3, "the floor"
    by_hand = 244.9 + 37.27 * math.log(5) + 31.47 * math.log1p(math.e**2) + 7.48 * math.log1p(math.exp(-6))
    by_hand += 0.000238 * 20_000 + 48.2 * 0.5 + 14.65 * 0.3
    assert float(curve.seconds(4, 32_768, 20_000, 0.5, 0.3)) == pytest.approx(by_hand / 1000)
    assert float(DecodeCurve().seconds(100, 1_000_000)) == pytest.approx(0.025 + 0.008 + 0.002)
    assert softplus(1e4) == 1e4
    assert attention_pairs(np.array([100.0]), np.array([50.0])).tolist() == [10_000.0]


def test_work_adds_up_to_full_batches() -> None:
    cost = PrefillCost()
    full = float(PrefillCurve().seconds(4, 32_768))
    assert sum(float(cost.work(8_192, 0)) for _ in range(4)) == pytest.approx(full)
    assert float(cost.work(8_192, 4_000)) > float(cost.work(8_192, 0))
    assert float(cost.alone(100, 0)) == 0.3
    assert float(cost.alone(70_000, 0)) > 2 * full * 0.8, "three calls"


def test_an_engine_unlike_the_prior_is_learnt() -> None:
    """A small model on a CPU: 2 ms a token, no floor."""
    cost, chance = PrefillCost(), random.Random(1)
    for _ in range(80):
        tokens = chance.randrange(64, 2048)
        cost.observe(0, PrefillBatch(1, tokens), 0.002 * tokens * chance.uniform(0.9, 1.1), 0.0)
    for tokens in (100, 500, 2000):
        assert cost.predict(PrefillBatch(1, tokens)) == pytest.approx(0.002 * tokens, rel=0.35)
    assert float(cost.work(1000, 0)) == pytest.approx(2.0, rel=0.25)


def test_an_attention_term_is_learnt() -> None:
    cost, chance = PrefillCost(), random.Random(2)
    curve = PrefillCurve(attention=2e-6)
    for _ in range(300):
        new, hit = chance.randrange(256, 32_768), chance.choice((0, chance.randrange(100_000)))
        pairs = float(attention_pairs(new, hit))
        batch = PrefillBatch(1, new, hit, float(hit > 0), hit / (new + hit), pairs)
        seconds = float(curve.seconds(1, new, hit, hit > 0, hit / (new + hit), pairs))
        cost.observe(0, batch, seconds * chance.uniform(0.95, 1.05), 0.0)
    cold, warm = float(cost.work(8000, 0)), float(cost.work(8000, 100_000))
    assert warm - cold == pytest.approx(2e-9 * 8000 * 100_000, rel=0.3)


def test_decode_scales_are_learnt_and_followed_when_they_change() -> None:
    cost, chance = DecodeCost(), random.Random(3)
    for truth in (DecodeCurve(10.0, 0.5, 1e-5), DecodeCurve(60.0, 0.5, 1e-5)):
        for _ in range(400):
            requests, kv = chance.randrange(1, 200), chance.randrange(1, 2_000_000)
            cost.observe(0, requests, kv, float(truth.seconds(requests, kv)) * chance.uniform(0.95, 1.05), 0.0)
        for requests, kv in ((30, 100_000), (100, 500_000), (200, 2_000_000)):
            assert float(cost.step(requests, kv)) == pytest.approx(float(truth.seconds(requests, kv)), rel=0.12)


@given(
    st.lists(
        st.one_of(
            st.floats(allow_nan=True, allow_infinity=True),
            st.just(1e300),
            st.floats(1e-9, 1e-6),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 10**6),
)
def test_absurd_observations_do_not_fool_it(wild: list[float], seed: int) -> None:
    """L22: in between true ones they move predictions by little, and never out of their bounds."""
    fit, chance = ScaleFit((1.0, 1.0)), random.Random(seed)
    for index in range(120):
        x = (chance.uniform(0.1, 1), chance.uniform(0.1, 1))
        fit.observe(x, 3 * x[0] + 2 * x[1])
        if index >= 60 and index % 8 == 0:
            fit.observe(x, wild[index // 8 % len(wild)])
    assert fit.predict((0.5, 0.5)) == pytest.approx(2.5, rel=0.15)
    assert all(0 <= theta <= 1e4 for theta in fit.theta)


@given(st.lists(st.sampled_from([0.43, 0.43, 1.72, 30.0]), min_size=30, max_size=120), st.integers(1, 40_000))
def test_parameters_that_nothing_tells_apart_stay_small(times: list[float], tokens: int) -> None:
    """Always the same batch: the prediction stays among what was observed."""
    cost = PrefillCost()
    for seconds in times:
        cost.observe(0, PrefillBatch(4, tokens), seconds, 0.0)
    assert min(times) * 0.8 <= cost.predict(PrefillBatch(4, tokens)) <= max(times) * 1.2


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats()), max_size=50))
def test_predictions_are_finite_and_not_negative(seen: list[tuple[float, float, float]]) -> None:
    fit = ScaleFit((1.0, 0.5))
    for one, other, value in seen:
        fit.observe((one, other), value)
    assert math.isfinite(fit.predict((1.0, 1.0)))
    assert fit.predict((1.0, 1.0)) >= 0


def test_a_slow_rank_is_known_and_tried_again() -> None:
    """L14: what is not observed decays to like-the-others."""
    slowness = Slowness(half_life_s=10.0)
    for second in range(30):
        slowness.observe(1, 4.0, float(second))
        slowness.observe(0, 1.0, float(second))
    slowness.observe(1, math.nan, 29.0)
    slowness.observe(1, -1.0, 29.0)
    factors = slowness.factors(np.array([0, 1, 2]), 29.0)
    assert factors[2] == 1.0, "never observed: like the mean"
    assert factors[1] / factors[0] == pytest.approx(4.0, rel=0.3)
    assert factors[0] < 1 < factors[1]
    assert slowness.factors(np.array([1]), 129.0)[0] == pytest.approx(1.0, abs=0.01)
    slowness.clear(1)
    assert slowness.factors(np.array([1]), 29.0)[0] == 1.0


def test_loading_rates_follow_and_stay_bounded() -> None:
    rates = LoadingRates(host_tokens_per_s=1e6, host_delay_s=0.001)
    assert float(rates.seconds(Source.HOST, 0)) == 0
    assert float(rates.seconds(Source.HOST, 1e6)) == pytest.approx(1.001)
    for _ in range(200):
        rates.observe(Source.HOST, 100_000, 1.001)
    assert rates.rate(Source.HOST) == pytest.approx(1e5, rel=0.01)
    for value in (math.nan, -1.0, 0.0):
        rates.observe(Source.HOST, 100_000, value)
    for _ in range(2000):
        rates.observe(Source.SHARED, 1, 1e6)
    assert rates.rate(Source.SHARED) == pytest.approx(4e5 / 100)
    with pytest.raises(ValueError, match="positive"):
        LoadingRates(host_tokens_per_s=0)
