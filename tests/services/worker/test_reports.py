"""An engine's numbers on the metrics page."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.messages import EngineStatus
from headrace.engine.reports import Conservation, WriteCounts
from headrace.services.runtime.metrics import Metrics
from headrace.services.worker.reports import EngineReporter, add_engine_metrics


def test_what_was_offered_to_the_tier_and_given_up_is_told() -> None:
    """Zero before the first look, so that the series are there from the start."""
    reporter: Any = SimpleNamespace(status=None)
    metrics = Metrics()
    add_engine_metrics(metrics, reporter)
    assert metrics.value("headrace_engine_tier_offers", what="dropped_blocks") == 0
    writes = WriteCounts(offered_blocks=9, dropped_blocks=4, pinned=2)
    reporter.status = EngineStatus(Conservation(0, 0, 0, 0, 0, 0), *([0] * 13), tier_writes=writes)
    found = {name: metrics.value("headrace_engine_tier_offers", what=name) for name in ("dropped_blocks", "pinned")}
    assert found == {"dropped_blocks": 4, "pinned": 2}


class FakeLink:
    """An engine that answers, until it is asked for the last time."""

    def __init__(self) -> None:
        self.asked = 0
        self.alive = True

    async def call(self, command: object) -> EngineStatus:
        self.asked += 1
        return EngineStatus(Conservation(0, 0, 0, 0, 0, 0), *([0] * 13))


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancel_that_comes_with_news_ends_the_reporter(turns: int) -> None:
    """At the end of a process both come at once; a reporter that went on would find the engine dead and say so."""
    link: Any = FakeLink()
    reporter = EngineReporter(link)
    task = asyncio.create_task(reporter.run())
    while not (link.asked and reporter._stale._waiters):  # type: ignore[attr-defined]  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    reporter.refresh()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=60.0)
    assert done
    assert task.cancelled()
