"""The SeaweedFS engine keeps the contract of stores, against a real cluster."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.tier_harness.weed import WeedCluster
from headrace.kvcache.cache_events import EventSink, ignore_events
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.store.base import Store, WallClock
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.seaweedfs.store import SeaweedStore
from headrace.services.worker.tier.weed_volumes import WeedVolumes
from tests.kvcache.store.contract import OpenStore, StoreContract

_names = (f"contract{number}" for number in itertools.count())


class TestSeaweed(StoreContract):
    @pytest.fixture
    def engine(self, tmp_path: Path, weed: WeedCluster) -> Iterator[OpenStore]:
        collection = next(_names)
        opened: list[SeaweedStore] = []

        def open_store(
            *, events: EventSink = ignore_events, wall: WallClock = time.time, queue_bytes: int = 64 << 20
        ) -> Store:
            settings = SeaweedSettings(
                (weed.master.address,), collection=collection, queue_bytes=queue_bytes, grow=2, fsync=False
            )
            index = SqliteIndex(tmp_path / "index.sqlite")
            opened.append(SeaweedStore(settings, index, files=WeedVolumes(), events=events, wall=wall))
            return opened[-1]

        yield open_store
        for store in opened:
            store.close()
            assert store.integrity() == (), "L11"
        weed.clear()
