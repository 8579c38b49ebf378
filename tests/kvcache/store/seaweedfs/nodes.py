"""Nodes of a SeaweedFS store for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.tier_harness.weed import WeedCluster
from headrace.kvcache.index.base import Index
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.store.base import WallClock
from headrace.kvcache.store.rebuild import RebuildState
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.seaweedfs.store import SeaweedStore
from headrace.services.worker.tier.weed_volumes import WeedVolumes
from tests.kvcache.store.contract import durable
from tests.kvcache.store.entries import prefix, soon

__all__ = ["durable", "node", "prefix", "wait_until"]


@contextmanager
def node(
    cluster: WeedCluster,
    collection: str,
    index: Index | None = None,
    *,
    wall: WallClock = time.time,
    **settings: object,
) -> Iterator[SeaweedStore]:
    """A store that has refilled its index."""
    chosen = SeaweedSettings((cluster.master.address,), collection=collection, grow=2, **settings)  # type: ignore[arg-type]
    store = SeaweedStore(chosen, index or DictIndex(), files=WeedVolumes(), wall=wall, rebuild_poll_s=0.05)
    try:
        wait_until(lambda: not store._index.needs_rebuild(soon()) and store.rebuild.state is RebuildState.COMPLETE)
        yield store
    finally:
        store.close()


def wait_until(true: object, seconds: float = 60.0) -> None:
    """Until `true()` is."""
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.01)
