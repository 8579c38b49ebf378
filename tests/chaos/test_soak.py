"""The chaos harness in its short form: a few faults of most kinds while clients with known right answers ask (L5, L6,
L7, L11, L14, L15, L16, L17, L28). `./build.sh soak` runs the long one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.chaos.__main__ import soak
from tests.chaos.results import Bars
from tests.chaos.round import Shape
from tests.chaos.schedule import Rates

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (package etcd-server)"),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs Redis (package redis-server)"),
]
SHORT = Shape(
    "v3",
    seconds=12.0,
    replicas={"router": 2, "prefill": 2, "decode": 2},
    clients=5,
    templates=12,
    tokens=24,
    rates=Rates(
        kills={"router": 5.0, "prefill": 5.0, "decode": 10.0, "redis": 5.0},
        stops={"prefill": 5.0},
        wires=10.0,
        disk=5.0,
        clock=5.0,
        in_turn=5.0,
    ),
    grace_s=600.0,
)
"""All faults are done, however busy the machine is."""


async def test_no_request_fails_and_nothing_is_left(tmp_path: Path) -> None:
    result = await soak(3, [SHORT], Bars(faults=8, kills=5, finished=12), tmp_path)
    assert not result["missed"], json.dumps(result, indent=1)
    assert set(result["kills_by_process"]) == {"router", "prefill", "decode", "redis"}
    assert result["faults_by_kind"]["restart_in_turn"] == 1
    assert result["faults_in_flight"]
