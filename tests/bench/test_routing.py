"""bench.routing on generated traces: the anchors' relations hold, the figures are right, and bars can be missed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import routing
from bench.routing_harness.plain import Lru, PlainIndex
from bench.routing_harness.policies import POLICIES
from bench.routing_harness.replay import Outcome, ceiling, keys_of, measure, replay
from headrace.router.index.base import HolderTier
from headrace.router.simulate.generated import Shape, generate, write_trace
from headrace.router.simulate.traces import Trace

SHAPE = Shape(requests=1200, span_s=900.0)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(SHAPE, 5)


@pytest.fixture(scope="module")
def outcomes(trace: Trace) -> dict[str, Outcome]:
    keys = keys_of(trace)
    return {
        name: replay(trace, keys, 8, None, POLICIES[name], PlainIndex)
        for name in ("headrace", "round_robin", "deepest_match", "lambda_1", "lambda_0.0002")
    }


def test_ours_has_most_of_the_ceiling_and_an_even_load(trace: Trace, outcomes: dict[str, Outcome]) -> None:
    """L21: affinity is bounded, and costs few hits."""
    ours = outcomes["headrace"]
    assert ours.hit_ratio >= 0.97 * ceiling(trace)
    assert ours.imbalance <= 1.1


def test_controls_fail_where_the_spec_says(trace: Trace, outcomes: dict[str, Outcome]) -> None:
    """L21: round robin wastes the cache, deepest match sends all to one, and λ too small does so for minutes."""
    best, ours = ceiling(trace), outcomes["headrace"]
    assert outcomes["round_robin"].hit_ratio < 0.7 * best
    assert outcomes["deepest_match"].hit_ratio == pytest.approx(best)
    assert outcomes["deepest_match"].imbalance == pytest.approx(8.0)
    assert outcomes["lambda_1"].hit_ratio < ours.hit_ratio
    assert outcomes["lambda_0.0002"].imbalance_60s_mean > 1.3 * ours.imbalance_60s_mean


def test_the_report_has_the_issue_s_shape_and_a_missed_bar_is_the_exit_status(
    tmp_path: Path, trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(Trace(trace.format, trace.rows[:400]), path)
    arguments = ["--trace", str(path), "--policy", "headrace", "--policy", "round_robin", "--json"]
    with pytest.raises(SystemExit) as ended:
        routing.main([*arguments, "--infinite-hits", "0.99"])
    assert ended.value.code == 1
    document = json.loads(capsys.readouterr().out)
    assert "infinite.hit_ratio" in document["missed"]
    assert set(document["policies"]) == {"headrace", "round_robin"}
    assert set(document["policies"]["headrace"]) == {"infinite", "cap5000"}
    assert {"hit_ratio", "imbalance", "imbalance_60s_mean", "imbalance_60s_p95"} <= set(
        document["policies"]["headrace"]["cap5000"]
    )
    assert 0 < document["ceiling"]["infinite"] < 1


def test_a_bar_that_a_control_passes_is_told() -> None:
    good = Outcome(0.5, 1.0, 1.0, 1.0, 1.0, 0.2)
    both = {"infinite": good, "cap5000": good}
    bars = routing.Bars()
    assert bars.missed(both) == []
    report = routing.build_report("t", generate(SHAPE, 1), 8, {"headrace": both, "round_robin": both}, bars)
    assert report.results["missed"] == []
    assert not report.results["bars_met"]


def test_both_indexes_route_alike(trace: Trace) -> None:
    """L24: the router's index tells what brute force tells, evictions and all."""
    part = Trace(trace.format, trace.rows[:500])
    keys = keys_of(part)
    one, other = (replay(part, keys, 8, 300, POLICIES["headrace"], make) for make in routing.INDEXES.values())
    assert one == other


def test_the_figures_by_hand() -> None:
    """Two workers, two windows of a minute."""
    at, sizes, hits = np.array([0.0, 1.0, 61.0]), np.array([10, 10, 8]), np.array([0, 4, 0])
    outcome = measure(at, sizes, hits, np.array([0, 1, 1]), 2)
    assert outcome.hit_ratio == pytest.approx(4 / 28)
    assert outcome.imbalance == pytest.approx(14 / 12)
    assert outcome.imbalance_60s_mean == pytest.approx((10 / 8 + 2) / 2)
    attention = (10 * 5, 6 * (4 + 3) + 8 * 4)
    assert outcome.attention_imbalance == pytest.approx(max(attention) / (sum(attention) / 2))
    assert outcome.busiest_share == pytest.approx(2 / 3)


def test_the_plain_index_and_the_caches_agree(trace: Trace) -> None:
    """Whatever was evicted, the index tells what each worker's cache has."""
    chance = np.random.default_rng(0)
    index, caches = PlainIndex(3), [Lru(60) for _ in range(3)]
    for blocks in keys_of(Trace(trace.format, trace.rows[:300])):
        match = index.match(blocks, None, len(blocks))
        assert match.device.tolist() == [cache.lead(blocks) for cache in caches]
        worker = int(chance.integers(3))
        came, left = caches[worker].use(blocks)
        index.removed(worker, HolderTier.DEVICE, left)
        index.stored(worker, HolderTier.DEVICE, came)
        assert index.entries == sum(len(cache) for cache in caches)
