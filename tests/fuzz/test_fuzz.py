"""The fuzzer in short: some messages to every method of every port, some forged handles, and nothing gives way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz.run import Size, fuzz
from tests.fuzz.world import running


@pytest.mark.timeout(1200)
async def test_nothing_gives_way(tmp_path: Path) -> None:
    """L1, L7, L10, L11, L13, L25: typed errors only, no wrong token, nothing left behind. `./build.sh fuzz` in full."""
    with running(tmp_path) as cluster:
        report = await fuzz(cluster, Size(messages=200, handles=30, seed=7))
    assert report["ok"], json.dumps({key: value for key, value in report.items() if key != "methods"}, indent=1)[
        :20_000
    ]
    assert (report["sent"], report["handles"]) == (200, 30)
    assert report["role_changes"] >= 1
