"""Open segments: shared, kept while read, and unlinked under a reader only after 30 s (L4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.handles import GRACE_S, IDLE_S, SegmentFiles
from headrace.kvcache.store.segments.table import SegmentTable
from headrace.kvcache.store.segments.unlinking import Unlinking
from tests.kvcache.store.entries import soon


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def files(tmp_path: Path) -> PosixFileLayer:
    layer = PosixFileLayer(tmp_path)
    for number in range(5):
        layer.create(f"v1/{number}.seg", direct=False).close()
        (tmp_path / f"v1/{number}.seg").write_bytes(bytes([number]) * 10)
    return layer


def test_a_reader_keeps_its_segment_for_a_while(files: PosixFileLayer, clock: Clock) -> None:
    handles = SegmentFiles(files, 10, direct=False, monotonic=clock)
    unlinking = Unlinking(files, DictIndex(), handles, SegmentTable(), 1.0)
    handle = handles.pin("v1/1.seg")
    assert handle is not None
    file = handles.open(handle, soon())
    unlinking.drop("v1/1.seg")
    assert "v1/1.seg" not in {f"v1/{name}" for name in files.list("v1")}, "out of sight at once"
    assert handles.pin("v1/1.seg") is None
    clock.now += GRACE_S - 1
    assert unlinking.reap() == 0
    target = memoryview(bytearray(10))
    assert file.preadv([target], 0) == 10
    clock.now += 1
    assert unlinking.reap() == 1
    assert "1.gone" not in files.list("v1")
    assert file.preadv([target], 0) == 10, "the bytes stay for who has them open: its own ones or none (L4)"
    assert bytes(target) == b"\1" * 10
    handles.unpin(handle)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.preadv([target], 0)
    handles.close()


def test_without_readers_it_goes_at_once(files: PosixFileLayer, clock: Clock) -> None:
    handles = SegmentFiles(files, 10, direct=False, monotonic=clock)
    unlinking = Unlinking(files, DictIndex(), handles, SegmentTable(), 1.0)
    handle = handles.pin("v1/1.seg")
    assert handle is not None
    handles.open(handle, soon())
    unlinking.drop("v1/1.seg")
    handles.unpin(handle)
    assert unlinking.reap() == 1
    assert list(files.list("v1")) == ["0.seg", "2.seg", "3.seg", "4.seg"]


def test_files_are_shared_and_bounded(files: PosixFileLayer, clock: Clock) -> None:
    handles = SegmentFiles(files, 2, direct=False, monotonic=clock)
    pinned = [handles.pin(f"v1/{number % 5}.seg") for number in range(10)]
    opened = [handles.open(handle, soon()) for handle in pinned if handle is not None]
    assert len({id(file) for file in opened}) == 5
    for handle in pinned:
        assert handle is not None
        handles.unpin(handle)
    closed = []
    for file in opened[:5]:
        try:
            file.size()
        except OSError:
            closed.append(file)
    assert len(closed) == 3
    clock.now += IDLE_S
    handles.reap()
    for file in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            file.size()


def test_a_segment_that_is_not_there_leaves_nothing(files: PosixFileLayer, clock: Clock) -> None:
    handles = SegmentFiles(files, 2, direct=False, monotonic=clock)
    handle = handles.pin("v1/77.seg")
    assert handle is not None
    with pytest.raises(FileNotFoundError):
        handles.open(handle, soon())
    handles.unpin(handle)
    assert handles.pin("v1/77.seg") is not handle
