"""The overload bench in short: real processes, twice what they can do, and nothing asserted about how fast they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.overload import LIMITS, QUEUE, SETS, SLOTS, holds
from bench.overload_harness.clients import WINDOW_S, Finished, Outcomes, ask, offer, open_client
from headrace.cli.client import replica_status
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.model import make

pytestmark = pytest.mark.timeout(900)


RATE, SECONDS = 60.0, 3.0
"""More than two cores can do of the tiny model, however fast they are, and more than slots and queue hold."""


def test_who_is_not_accepted_is_told_when_to_come_back(tmp_path: Path) -> None:
    """L12, L11: nobody fails: accepted ones have all their tokens, the others RESOURCE_EXHAUSTED with a time. No more
    than slots and queue hold are kept, and afterwards everything is free and serves."""
    folder = make("deepseek-v41-tiny", tmp_path / "models", 0)

    async def story(router: str) -> tuple[Outcomes, Outcomes]:
        after = Outcomes()
        async with open_client(router) as stub:
            over = await offer(stub, RATE, SECONDS)
            await over.settle()
            await ask(stub, after)
        return over, after

    with LocalCluster(ClusterSpec(folder, sets=SETS), run_dir=tmp_path / "run") as cluster:
        over, after = asyncio.run(story(cluster.router))
        problems = [
            (child.name, status.integrity.problems, status.requests)
            for child in cluster.children
            if child.address is not None
            for status in [replica_status(child.address, check_integrity=True)]
            if status.integrity.problems or status.requests.live
        ]
    assert over.failed == []
    assert over.refused
    assert all(time_s is not None and time_s > 0 for time_s in over.refused)
    assert len(over.finished) >= SLOTS + QUEUE
    assert over.offered == len(over.finished) + len(over.refused)
    assert (len(after.finished), problems) == (1, [])


def test_goodput_leaves_the_first_window_out() -> None:
    outcomes = Outcomes(began=100.0, seconds=3 * WINDOW_S)
    for window, number in enumerate((1, 10, 5)):
        ended = 100.0 + (window + 0.5) * WINDOW_S
        outcomes.finished += [Finished(0.1, 0.01, ended)] * number
    found = outcomes.goodput(capacity=10 / WINDOW_S)
    assert (found.mean, found.least) == (pytest.approx(0.75), pytest.approx(0.5))


@pytest.mark.parametrize(
    "change", [{"failed": 1}, {"refused": 0}, {"refused_without_time": 1}, {"tpot_ratio": 2.0}, {"goodput_ratio": 0.5}]
)
def test_each_limit_counts(change: dict[str, float]) -> None:
    good = {**LIMITS, "failed": 0, "refused": 5, "refused_without_time": 0}
    assert holds(dict(good))
    assert not holds({**good, **change})
