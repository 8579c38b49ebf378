"""One SeaweedFS cluster for a test module: a master and three volume servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.tier_harness.processes import ServerMissing
from bench.tier_harness.weed import WeedCluster


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeedCluster]:
    try:
        cluster = WeedCluster(tmp_path_factory.mktemp("weed"))
    except ServerMissing as error:
        pytest.skip(str(error))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
