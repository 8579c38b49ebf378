"""The C++ of the write path and its twins in Python: the same bytes in memory and on disk, the same ends of runs."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headrace.compiler import NativeUnavailable
from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.store.files_posix import PosixFile, PosixFileLayer
from headrace.kvcache.store.segments import copies, writes
from headrace.kvcache.store.segments.buffers import BufferPool
from headrace.kvcache.store.segments.groups import Group, Run
from headrace.kvcache.store.segments.names import Bucket, SegmentName
from headrace.kvcache.store.segments.native.library import RecordsLibrary, load
from headrace.kvcache.store.segments.open_segment import OpenSegment
from headrace.kvcache.store.segments.record import HEADER_BYTES, Header, read_header, record_bytes, write_fields
from headrace.kvcache.store.segments.writes import Ended, NativeWrites, ThreadWrites, Writes
from tests.kvcache.store.entries import NAMESPACE, block
from tests.kvcache.store.segments.fake_files import BufferedLayer

Open = Callable[[Ended], Writes]
BUCKET = Bucket(NAMESPACE, RetentionClass.CHAT, 1_800_000_000)


@pytest.fixture(scope="module")
def library() -> RecordsLibrary:
    try:
        return load()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=["native", "threads"])
def open_writes(request: pytest.FixtureRequest) -> Open:
    if request.param == "threads":
        return lambda ended: ThreadWrites(3, ended)
    library = request.getfixturevalue("library")
    return lambda ended: NativeWrites(library, 3, ended)


class Ends:
    """What writes tell."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        self.failures: dict[int, Exception | None] = {}
        """By offset."""

    def __call__(self, run: Run, failure: Exception | None) -> None:
        with self._told:
            assert run.offset not in self.failures
            self.failures[run.offset] = failure
            self._told.notify_all()

    def wait(self, count: int) -> None:
        with self._told:
            assert self._told.wait_for(lambda: len(self.failures) >= count, 20.0)


def segment(root: Path, number: int, size: int) -> OpenSegment:
    return OpenSegment(PosixFileLayer(root), SegmentName(BUCKET, "node-aa", number), size, direct=False)


def run_of(pool: BufferPool, into: OpenSegment, numbers: Sequence[int], offset: int) -> tuple[Run, list[Header]]:
    """Blocks of these numbers, one behind the other."""
    entries = [block("a", number, length=3_000 + 500 * number) for number in numbers]
    buffers = pool.take_now(record_bytes(entry.info.length) for entry in entries)
    copies.fill(buffers, [entry.payload for entry in entries])
    headers, at = [], offset
    for entry, buffer in zip(entries, buffers, strict=True):
        headers.append(Header(entry.info, 7, at, BUCKET.end, into.identity))
        write_fields(headers[-1], buffer.view)
        at += buffer.size
    return Run(Group(), into, (), offset, buffers), headers


def test_both_copies_are_the_same(library: RecordsLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """L25: whatever lay there before, a record is a page of zeros, the payload, zeros; of any length and any kind of
    memory."""
    rng = random.Random(1)
    pool = BufferPool(8 << 20)
    lengths = [1, 63, 64, 65, 4_095, 4_096, 4_097, 114_048, 300_000, *(rng.randrange(1, 20_000) for _ in range(20))]
    payloads: list[bytes | memoryview] = []
    for place, length in enumerate(lengths):
        content = rng.randbytes(length + 3)
        whole = memoryview(bytearray(content) if place % 2 else content)
        payloads.append(content[3:] if place % 3 == 0 else whole[3:])
    outcomes: list[list[bytes]] = []
    for use in (library, None):
        monkeypatch.setattr(copies, "records_library", lambda use=use: use)
        buffers = pool.take_now(map(record_bytes, lengths))
        for buffer in buffers:
            buffer.array[:] = 0xFF
        copies.fill(buffers, payloads)
        outcomes.append([bytes(buffer.view) for buffer in buffers])
        pool.give(*buffers)
    for length, payload, native, plain in zip(lengths, payloads, *outcomes, strict=True):
        assert native == plain, length
        assert native == (bytes(HEADER_BYTES) + bytes(payload)).ljust(record_bytes(length), b"\0"), length


def test_what_is_no_memory_is_refused(library: RecordsLibrary) -> None:
    """L13: an error of the caller's, with nothing copied and nothing held."""
    buffers = BufferPool(1 << 20).take_now([8_192] * 2)
    held = bytearray(100)
    with pytest.raises(TypeError, match="bytes-like"):
        copies.fill(buffers, [held, "text"])  # type: ignore[list-item]
    held.append(1)  # no view of it is left


def test_runs_are_written_whole(open_writes: Open, tmp_path: Path) -> None:
    """L3: every header has its checksum, every payload its place, whichever threads wrote; runs may overtake."""
    ends, pool = Ends(), BufferPool(8 << 20)
    opened = open_writes(ends)
    opened.start()
    into = segment(tmp_path, 1, 1 << 20)
    runs, expected, at = [], [], 0
    for start in range(0, 60, 6):
        run, headers = run_of(pool, into, range(start, start + 6), at)
        runs.append(run)
        expected += headers
        at = headers[-1].end
    random.Random(2).shuffle(runs)
    for run in runs:
        opened.submit(run)
    opened.close()
    opened.join()
    assert ends.failures == {run.offset: None for run in runs}
    data = memoryview((tmp_path / into.path).read_bytes())
    for header in expected:
        assert read_header(data[header.offset : header.offset + HEADER_BYTES]) == header
        payload = data[header.offset + HEADER_BYTES :][: header.info.length]
        assert payload == block("a", header.info.tokens // 128 - 1, length=header.info.length).payload


def test_a_failed_run_says_why_and_the_others_go_on(open_writes: Open, tmp_path: Path) -> None:
    """L13: a full disk, a closed file: the errno, once; what is written elsewhere is not disturbed."""
    ends, pool = Ends(), BufferPool(8 << 20)
    opened = open_writes(ends)
    opened.start()
    good, full, closed = (segment(tmp_path, number, 1 << 20) for number in (1, 2, 3))
    full._file.close()
    full._file = PosixFile(os.open("/dev/full", os.O_WRONLY))
    closed.forsake()
    for place, into in enumerate((full, good, closed, good)):
        opened.submit(run_of(pool, into, (place,), place << 16)[0])
    ends.wait(4)
    opened.close()
    opened.join()
    causes = {offset >> 16: failure.errno for offset, failure in ends.failures.items() if isinstance(failure, OSError)}
    assert causes == {0: errno.ENOSPC, 2: errno.EBADF}
    good.forsake()
    full.forsake()


def test_outcomes_come_without_more_work(open_writes: Open, tmp_path: Path) -> None:
    """L6: a single run is told of although no other comes."""
    ends, pool = Ends(), BufferPool(1 << 20)
    opened = open_writes(ends)
    opened.start()
    into = segment(tmp_path, 1, 1 << 20)
    for place in range(3):
        opened.submit(run_of(pool, into, (place,), place << 16)[0])
        ends.wait(place + 1)
    opened.close()
    opened.join()


def test_who_writes_what(library: RecordsLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ where files are descriptors; Python elsewhere, and where there is no compiler."""

    class OtherLayer(BufferedLayer):
        descriptors = False

    def kind(layer: PosixFileLayer) -> type[Writes]:
        opened = writes.open_writes(layer, 1, lambda run, failure: None)
        opened.start()
        opened.close()
        opened.join()
        return type(opened)

    assert kind(PosixFileLayer(tmp_path)) is NativeWrites
    assert kind(OtherLayer(tmp_path)) is ThreadWrites
    monkeypatch.setattr(writes, "records_library", lambda: None)
    assert kind(PosixFileLayer(tmp_path)) is ThreadWrites


@pytest.mark.parametrize("descriptors", [True, False])
def test_the_library_is_had_before_the_first_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, descriptors: bool
) -> None:
    """A put copies by it over files of every kind (3FS's are no descriptors) and never waits for a compiler."""
    asked: list[None] = []
    monkeypatch.setattr(writes, "records_library", lambda: asked.append(None))
    layer = BufferedLayer(tmp_path)
    monkeypatch.setattr(layer, "descriptors", descriptors, raising=False)
    writes.open_writes(layer, 1, lambda run, failure: None)
    assert asked
