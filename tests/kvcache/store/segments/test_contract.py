"""The segment engine keeps the contract of stores, with the dict index and with SQLite."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.kvcache.cache_events import EventSink, ignore_events
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.store.base import Store, WallClock
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.settings import SegmentSettings
from tests.kvcache.store.contract import OpenStore, StoreContract


class TestSegments(StoreContract):
    @pytest.fixture(params=["dict", "sqlite"])
    def engine(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OpenStore]:
        opened: list[SegmentStore] = []

        def open_store(
            *, events: EventSink = ignore_events, wall: WallClock = time.time, queue_bytes: int = 64 << 20
        ) -> Store:
            index = DictIndex() if request.param == "dict" else SqliteIndex(tmp_path / "index.sqlite")
            settings = SegmentSettings(
                segment_bytes=256 * 1024,
                queue_bytes=queue_bytes,
                read_buffer_bytes=4 << 20,
                read_threads=2,
                sync_idle_s=0.005,
            )
            store = SegmentStore(PosixFileLayer(tmp_path / "store"), index, settings, events=events, wall=wall)
            opened.append(store)
            return store

        yield open_store
        # L11: whatever a test did, nothing is taken, pinned or in flight once its store is closed.
        assert [store.integrity() for store in opened] == [()] * len(opened)
