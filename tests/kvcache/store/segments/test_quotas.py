"""What may be written: races between opening, listing and sealing, and limits that do not go away."""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path

import pytest

from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.names import Bucket, SegmentName
from headrace.kvcache.store.segments.own_segments import OwnSegments
from headrace.kvcache.store.segments.pending import WriteQueue
from headrace.kvcache.store.segments.quotas import MEASURE_S, Quotas
from headrace.kvcache.store.segments.record import record_bytes
from headrace.kvcache.store.segments.settings import SegmentSettings
from headrace.kvcache.store.segments.table import SegmentTable
from tests.kvcache.store.entries import NAMESPACE, OTHER_TENANT, TENANT, block

SEGMENT = 128 * 1024


class Parts:
    def __init__(self, root: Path, capacity: int, tenant: int = 0) -> None:
        self.files = PosixFileLayer(root)
        self.table, self.own = SegmentTable(), OwnSegments()
        self.now = 0.0
        self.quotas = Quotas(
            self.files, self.table, WriteQueue(), self.own, SEGMENT, capacity, tenant, monotonic=lambda: self.now
        )
        self.bucket = Bucket(NAMESPACE, block("a", 0).info.retention, 1_800_000_000)

    def path(self, number: int) -> str:
        return SegmentName(self.bucket, "n-1", number).path

    def ask(self, number: int) -> bool:
        """As the writer does: own first, then the quota."""
        self.own.opened(self.path(number))
        try:
            return self.quotas.open_segment(self.path(number)) == SEGMENT
        except OSError:
            self.own.closed(self.path(number))
            return False

    def make(self, number: int) -> None:
        file = self.files.create(self.path(number), direct=False)
        file.truncate(SEGMENT)
        file.close()

    def row(self, number: int, tenant: bytes = TENANT) -> IndexRow:
        info = block("a", number, tenant=tenant).info
        place = number * record_bytes(info.length)
        return IndexRow(info.key, self.path(1), place, info.length, info.kind, info.retention, 128, 0, tenant)


def test_a_segment_between_permission_and_creation_stays_counted(tmp_path: Path) -> None:
    parts = Parts(tmp_path, 2 * SEGMENT)
    assert parts.ask(1)
    parts.quotas.measure()  # by another thread, before the file is there
    assert parts.ask(2)
    assert not parts.ask(3)
    parts.make(1)
    parts.make(2)
    assert not parts.ask(4)
    parts.files.unlink(parts.path(1))
    parts.own.closed(parts.path(1))
    assert parts.ask(5)


def test_a_segment_that_could_not_be_made_gives_its_place_back(tmp_path: Path) -> None:
    parts = Parts(tmp_path, SEGMENT)
    assert parts.ask(1)
    parts.own.closed(parts.path(1))
    assert parts.ask(2)


def test_full_refuses_at_once_until_there_is_room(tmp_path: Path) -> None:
    parts = Parts(tmp_path, SEGMENT)
    info = block("a", 0).info
    assert parts.ask(1)
    parts.make(1)
    assert parts.quotas.room(info.tenant_tag) >= 4096, "the open segment may have room"
    assert not parts.ask(2)
    assert parts.quotas.room(info.tenant_tag) < 4096
    assert parts.quotas.pressing()
    parts.files.unlink(parts.path(1))
    parts.quotas.measure()
    assert parts.quotas.room(info.tenant_tag) >= 4096


def test_what_cannot_be_relieved_rests(tmp_path: Path) -> None:
    """A store full of pinned entries is not swept every second."""
    parts = Parts(tmp_path, SEGMENT)
    assert parts.ask(1)
    parts.make(1)
    assert parts.quotas.pressing()
    parts.quotas.relieved()
    assert not parts.quotas.pressing()
    parts.now = MEASURE_S + 1
    assert parts.quotas.pressing()
    parts.files.unlink(parts.path(1))
    parts.quotas.measure()
    parts.quotas.relieved()
    parts.make(2)
    parts.quotas.measure()
    assert parts.quotas.pressing(), "no rest where there was no pressure"


def test_a_tenant_near_its_quota_presses_and_one_beyond_is_refused(tmp_path: Path) -> None:
    size = record_bytes(5_000)
    parts = Parts(tmp_path, 100 * SEGMENT, tenant=10 * size)
    parts.quotas.measure()
    parts.table.add(parts.row(number) for number in range(9))
    assert not parts.quotas.pressing()
    assert parts.quotas.room(block("a", 9).info.tenant_tag) >= size
    parts.table.add([parts.row(9)])
    assert parts.quotas.pressing()
    assert parts.quotas.room(block("a", 10).info.tenant_tag) < size
    assert parts.quotas.room(OTHER_TENANT) >= size


def test_without_a_capacity_the_disk_is_the_limit(tmp_path: Path) -> None:
    parts = Parts(tmp_path, 0)
    parts.quotas.measure()
    free = parts.files.free_bytes()
    assert 0.5 * free < parts.quotas.quota.disk_bytes < 2 * free
    assert parts.ask(1)


class SmallDisk(PosixFileLayer):
    """A disk of its own, `size` bytes large."""

    def __init__(self, root: Path, size: int) -> None:
        super().__init__(root)
        self.size = size

    def free_bytes(self) -> int:
        return self.size - sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())


def test_segments_suit_the_room_of_now(tmp_path: Path) -> None:
    """A small disk takes small segments, without any setting; a record never gets less than it needs."""
    own, path = OwnSegments(), Parts(tmp_path / "names", 0).path
    for number in range(1, 5):
        own.opened(path(number))
    for size, expected in ((1 << 40, 256), (8 << 30, 64), (1 << 30, 8), (40 << 20, 4)):
        quotas = Quotas(SmallDisk(tmp_path / "s", size), SegmentTable(), WriteQueue(), own, 256 << 20, 0, 0)
        assert quotas.open_segment(path(1)) == expected << 20
    assert quotas.open_segment(path(2), least=30 << 20) == 30 << 20
    assert quotas.open_segment(path(3)) == 4 << 20
    with pytest.raises(OSError, match=r"39,845,888 of 41,943,040 bytes.*cache\.quota_bytes") as error:
        quotas.open_segment(path(4))
    assert error.value.errno == errno.EDQUOT
    bounded = Quotas(SmallDisk(tmp_path / "s", 1 << 40), SegmentTable(), WriteQueue(), own, 256 << 20, 1 << 30, 0)
    assert bounded.open_segment(path(1)) == 8 << 20, "a quota below what the disk has"


def test_a_store_with_defaults_stores_on_a_small_disk(tmp_path: Path) -> None:
    """100 MiB are less than one segment of a large store."""
    files = SmallDisk(tmp_path, 100 << 20)
    with closing(SegmentStore(files, DictIndex(), SegmentSettings())) as store:
        assert all(store.put_many([block("small", number) for number in range(8)]).durable.result(10))
        assert not store.stats().failed_writes
