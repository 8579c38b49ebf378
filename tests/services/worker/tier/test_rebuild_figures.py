"""The gauges of a refill."""

from __future__ import annotations

from headrace.kvcache.store.rebuild import RebuildProgress, RebuildState
from headrace.services.worker.tier.metrics import rebuild_figures


def test_figures_say_who_refills() -> None:
    figures = rebuild_figures(RebuildProgress(RebuildState.ELSEWHERE, rows=7, added=5, rebuilds=2))
    assert figures == {
        ("rows",): 7,
        ("added",): 5,
        ("finished",): 2,
        ("running",): 0,
        ("elsewhere",): 1,
        ("failed",): 0,
    }
