"""Snapshots that the router asks for: forks and the system message's end, in whole blocks of the expanded prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.kvcache.keys import block_keys
from headrace.services.router.settings import ReplaySection, RouterSection, RouterSettings
from headrace.services.router.snapshots import SnapshotPlanner, expanded
from headrace.v1 import common_pb2

BLOCK = 16
SETTINGS = RouterSettings(router=RouterSection(fork_min_tokens=32))


def planner(window: int = 16, settings: RouterSettings = SETTINGS) -> SnapshotPlanner:
    model: Any = SimpleNamespace(window=window)
    return SnapshotPlanner(settings, model)


def request(ids: list[int], system: int = 0, asked: tuple[int, ...] = ()) -> tuple[Any, Any]:
    spec = common_pb2.RequestSpec(block_keys=block_keys(bytes(32), ids, BLOCK), snapshot_at=asked)
    return SimpleNamespace(spec=spec), SimpleNamespace(system_tokens=system)


def planned(one: SnapshotPlanner, *args: Any) -> list[int]:
    placed, prepared = request(*args)
    one.plan(placed, prepared, BLOCK)
    return list(placed.spec.snapshot_at)


def test_a_fork_gets_a_snapshot_at_its_boundary() -> None:
    """spec/kv_tier.md: at forks the router has seen; what the client asked for stays."""
    one = planner()
    shared = [7] * 70
    assert planned(one, [*shared, *[8] * 40]) == []
    assert planned(one, [*shared, *[9] * 40], 0, (16,)) == [16, 64]
    assert one.found == 1


def test_the_system_message_ends_with_one() -> None:
    one = planner()
    assert planned(one, [5] * 100, 50) == [48]
    assert planned(one, [6] * 100, 31) == [], "shorter than fork_min_tokens"


def test_images_before_the_end_count_in_full() -> None:
    spans = [common_pb2.ImageSpan(start=4, length=10), common_pb2.ImageSpan(start=20, length=5)]
    assert [expanded(tokens, spans) for tokens in (4, 5, 11, 12, 20)] == [4, 14, 20, 25, 33]


@pytest.mark.parametrize(
    "one",
    [planner(window=0), planner(settings=RouterSettings(replay=ReplaySection(mode="off")))],
    ids=["no window", "no reuse"],
)
def test_models_without_snapshots_get_none(one: SnapshotPlanner) -> None:
    assert planned(one, [7] * 100, 50) == []
    assert planned(one, [*[7] * 70, *[9] * 40]) == []
    assert one.remembered == 0
