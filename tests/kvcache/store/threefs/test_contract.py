"""The segment engine on 3FS keeps the contract of stores: on a quiet double and on a slow, shuffled one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace.kvcache.cache_events import EventSink, ignore_events
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.store.base import Store, WallClock
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.settings import SegmentSettings
from headrace.kvcache.store.threefs.layer import ThreeFsLayer
from tests.kvcache.store.contract import OpenStore, StoreContract
from tests.kvcache.store.threefs.conftest import settings_of
from tests.kvcache.store.threefs.usrbio_double import Double


class TestThreeFs(StoreContract):
    @pytest.fixture(params=["quiet", "shuffled"])
    def engine(self, double: Double, mount: Path, tmp_path: Path, request: pytest.FixtureRequest) -> OpenStore:
        if request.param == "shuffled":
            double.set(delay_us=200, jitter_us=2000, stray=1)
        (mount / "store").mkdir()

        def open_store(
            *, events: EventSink = ignore_events, wall: WallClock = time.time, queue_bytes: int = 64 << 20
        ) -> Store:
            settings = SegmentSettings(
                segment_bytes=256 * 1024,
                queue_bytes=queue_bytes,
                read_buffer_bytes=4 << 20,
                read_threads=2,
                sync_idle_s=0.005,
            )
            layer = ThreeFsLayer(str(mount / "store"), settings_of(double, slot_bytes=1 << 14))
            return SegmentStore(layer, SqliteIndex(tmp_path / "index.sqlite"), settings, events=events, wall=wall)

        return open_store
