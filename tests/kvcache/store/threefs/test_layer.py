"""The file layer over the double: names, lost and found mounts, hanging name operations."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headrace.kvcache.entries import Miss
from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.files import miss_of
from headrace.kvcache.store.threefs.breaker import BreakerSettings, State
from headrace.kvcache.store.threefs.layer import ThreeFsLayer
from headrace.kvcache.store.threefs.names import Names
from tests.kvcache.store.threefs.conftest import settings_of
from tests.kvcache.store.threefs.test_ring import buffer, wait_for
from tests.kvcache.store.threefs.usrbio_double import Double, descriptors, fails

PAGE = 4096
LONG = 60.0


def missed(call: Callable[[], object]) -> Miss:
    """Which miss a call that must fail counts as."""
    with pytest.raises(OSError, match="Errno") as caught:
        call()
    return miss_of(caught.value)


def page(letter: bytes) -> memoryview:
    return memoryview(letter * PAGE)


def test_files_are_made_written_read_renamed_and_removed(layer: ThreeFsLayer) -> None:
    file = layer.create("v1/a/b/one.seg", direct=True)
    file.truncate(8 * PAGE)
    assert file.pwritev([page(b"a"), page(b"b")], 0) == 2 * PAGE
    file.datasync()
    assert file.size() == 8 * PAGE
    file.close()
    file.close()
    with pytest.raises(FileExistsError):
        layer.create("v1/a/b/one.seg", direct=True)
    layer.rename("v1/a/b/one.seg", "v1/a/b/two.seg")
    layer.sync_directory("v1/a/b")
    assert list(layer.list("v1/a/b")) == ["two.seg"]
    again = layer.open("v1/a/b/two.seg", direct=True)
    back = buffer(2 * PAGE)
    assert again.preadv([back], 0, time.monotonic() + LONG) == 2 * PAGE
    assert bytes(back) == b"a" * PAGE + b"b" * PAGE
    with fails(errno.EACCES):
        again.pwritev([page(b"c")], 0)
    again.close()
    with fails(errno.EBADF):
        again.preadv([back], 0)
    layer.unlink("v1/a/b/two.seg")
    layer.rmdir("v1/a/b")
    assert list(layer.list("v1/a/b")) == []
    assert layer.free_bytes() > 0
    with pytest.raises(FileNotFoundError):
        layer.open("v1/a/b/two.seg", direct=True)


def test_a_lock_is_exclusive_and_ends_with_its_file(layer: ThreeFsLayer) -> None:
    held = layer.lock("writers/one")
    assert held is not None
    assert layer.lock("writers/one") is None
    held.close()
    wait_for(lambda: (again := layer.lock("writers/one")) is not None and again.close() is None)


def test_nothing_is_left_open_or_registered(double: Double, mount: Path) -> None:
    (mount / "store").mkdir()
    after: list[int] = []
    for turn in range(2):  # the first turn loads what is loaded once
        layer = ThreeFsLayer(str(mount / "store"), settings_of(double))
        for i in range(20):
            file = layer.create(f"v1/{turn}-{i}", direct=True)
            file.pwritev([page(b"a")], 0)
            file.close()
        layer.close()
        after.append(descriptors())
    assert after[1] <= after[0]
    # hf3fs_iordestroy leaves the names of rings with flags behind; the layer removes them.
    assert os.listdir(mount / "3fs-virt" / "iovs") == []
    assert os.listdir(mount / "store") == ["v1"]  # nor does a probe leave anything


def test_a_directory_that_is_no_3fs_is_refused_with_what_to_do(double: Double, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="3fs-virt"):
        ThreeFsLayer(str(tmp_path), settings_of(double))


def test_a_late_write_spoils_the_file_and_not_the_store(double: Double, mount: Path) -> None:
    """Remote writes cannot be recalled (spec/protocol.md): the place of a write without answer is never used again."""
    (mount / "store").mkdir()
    layer = ThreeFsLayer(str(mount / "store"), settings_of(double, io_timeout_s=0.05))
    file = layer.create("one", direct=True)
    double.set(hold=1)
    with pytest.raises(TimeoutError):
        file.pwritev([page(b"a")], 0)
    double.set(hold=0)
    with fails(errno.ESTALE):
        file.pwritev([page(b"b")], PAGE)
    other = layer.create("two", direct=True)
    assert other.pwritev([page(b"c")], 0) == PAGE
    double.set(release=1)
    wait_for(lambda: layer.stats.writes.held_slots == 0)
    file.close()
    other.close()
    layer.close()


def quick() -> BreakerSettings:
    return BreakerSettings(timeouts_in_row=2, first_pause_s=0.02, longest_pause_s=0.05)


def test_a_vanished_mount_is_a_miss_at_once_and_heals_by_itself(double: Double, mount: Path) -> None:
    """L17: reads time out until the mount counts as gone, then nothing is asked; a probe brings it back on new rings,
    and open files go on, though their descriptors died with the old FUSE process."""
    (mount / "store").mkdir()
    layer = ThreeFsLayer(str(mount / "store"), settings_of(double, breaker=quick()))
    writer = layer.create("one", direct=True)
    writer.pwritev([page(b"a")], 0)
    reader = layer.open("one", direct=True)
    idle = layer.open("one", direct=True)
    target = buffer(PAGE)

    double.set(mounted=0)
    misses: list[Miss] = []
    while Miss.NOT_CONNECTED not in misses:
        misses.append(missed(lambda: reader.preadv([target], 0, time.monotonic() + 0.03)))
    assert set(misses[:-1]) <= {Miss.TIMEOUT}
    assert len(misses) <= 8
    for call in (
        lambda: layer.open("one", direct=True),
        lambda: layer.list("v1"),
        lambda: writer.pwritev([page(b"b")], PAGE),
        lambda: layer.free_bytes(),
    ):
        assert missed(call) is Miss.NOT_CONNECTED

    double.set(mounted=1)
    wait_for(lambda: layer.mount.breaker.state is State.CLOSED)
    stats = layer.stats
    assert stats.connections == 2
    assert stats.opened == 1
    assert stats.reads.held_slots == 0
    for file in (reader, idle):
        assert file.preadv([target], 0, time.monotonic() + LONG) == PAGE
        assert bytes(target) == b"a" * PAGE
        file.close()
    with fails(errno.ESTALE):
        writer.pwritev([page(b"b")], PAGE)  # its earlier write may still land
    writer.close()
    again = layer.create("two", direct=True)
    assert again.pwritev([page(b"b")], 0) == PAGE
    again.datasync()
    again.close()
    layer.close()
    assert os.listdir(mount / "3fs-virt" / "iovs") == []


def test_descriptors_closed_while_the_mount_was_gone_do_not_block_their_numbers(double: Double, mount: Path) -> None:
    """hf3fs_dereg_fd does nothing on a dead mount, and hf3fs_reg_fd refuses a number that is registered: the old
    registration must go, or a reader gets another file's bytes."""
    (mount / "store").mkdir()
    layer = ThreeFsLayer(str(mount / "store"), settings_of(double, breaker=quick()))
    for name in ("one", "two"):
        file = layer.create(name, direct=True)
        file.pwritev([page(name[:1].encode())], 0)
        file.close()
    reader = layer.open("one", direct=True)
    double.set(mounted=0)
    layer.mount.breaker.trip()
    reader.close()
    wait_for(lambda: layer.stats.name_calls == 0)
    double.set(mounted=1)
    wait_for(lambda: layer.mount.breaker.state is State.CLOSED)
    target = buffer(PAGE)
    for _ in range(4):
        for name in ("two", "one"):
            file = layer.open(name, direct=True)
            assert file.preadv([target], 0, time.monotonic() + LONG) == PAGE
            assert bytes(target) == name[:1].encode() * PAGE
            file.close()
    layer.close()


class HangingNames(Names):
    """A mount whose server stopped: name operations wait for `go`. Misses are remembered as 3FS's mount does."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.denied: dict[str, int] = {}

    def open(self, path: str, flags: int) -> int:
        self.go.wait(LONG)
        left = self.denied.get(os.path.basename(os.path.dirname(path)), 0)
        if left:
            self.denied[os.path.basename(os.path.dirname(path))] = left - 1
            raise FileNotFoundError(errno.ENOENT, "remembered as missing", path)
        return super().open(path, flags)

    def list(self, path: str) -> Sequence[str]:
        self.go.wait(LONG)
        return super().list(path)


def test_hanging_name_operations_end_at_the_deadline_and_open_the_breaker(double: Double, mount: Path) -> None:
    """L6, L17: a stopped FUSE process makes open() uninterruptible; a request waits for its own deadline only."""
    (mount / "store").mkdir()
    names = HangingNames()
    layer = ThreeFsLayer(str(mount / "store"), settings_of(double, breaker=quick(), name_timeout_s=0.1), names)
    layer.create("one", direct=True).close()
    names.go.clear()
    seen = []
    while layer.mount.breaker.state is State.CLOSED:
        seen.append(missed(lambda: layer.open("one", direct=True, deadline=time.monotonic() + 0.03)))
    assert set(seen) <= {Miss.TIMEOUT, Miss.NOT_CONNECTED}
    assert len(seen) <= 4
    assert missed(lambda: layer.list("v1")) is Miss.NOT_CONNECTED
    before = descriptors()
    names.go.set()
    wait_for(lambda: layer.mount.breaker.state is State.CLOSED)
    wait_for(lambda: layer.stats.name_calls == 0)
    assert layer.list("v1") == ()
    assert descriptors() <= before + 4  # what was opened too late was closed; new rings may have come
    layer.close()


def test_a_directory_that_another_host_has_just_made_is_waited_for(double: Double, mount: Path) -> None:
    """The mount denies it for 5 s: mkdir says it exists, open says it does not, and stat is not asked."""
    (mount / "store" / "shared").mkdir(parents=True)
    names = HangingNames()
    layer = ThreeFsLayer(str(mount / "store"), settings_of(double), names)
    names.denied["shared"] = 3
    file = layer.create("shared/one", direct=True)
    assert names.denied["shared"] == 0
    file.close()
    layer.close()


def test_closing_many_files_at_once_delays_no_open(double: Double, mount: Path) -> None:
    """Closing asks the mount too: a hundred files that are given up must not make others BUSY."""
    (mount / "store").mkdir()

    class SlowClose(Names):
        go = threading.Event()

        def close(self, fd: int) -> None:
            self.go.wait(LONG)
            super().close(fd)

    names = SlowClose()
    names.go.set()
    layer = ThreeFsLayer(str(mount / "store"), settings_of(double), names)
    layer.create("one", direct=True).close()
    files = [layer.open("one", direct=True) for _ in range(100)]
    names.go.clear()
    for file in files:
        file.close()
    again = layer.open("one", direct=True, deadline=time.monotonic() + LONG)
    assert layer.stats.name_calls == 100
    names.go.set()
    again.close()
    layer.close()


def test_io_errors_of_a_living_mount_do_not_open_the_breaker(double: Double, layer: ThreeFsLayer) -> None:
    file = layer.create("one", direct=True)
    file.pwritev([page(b"a")], 0)
    double.set(fail_every=1, fail_errno=errno.EIO)
    for _ in range(40):
        assert missed(lambda: file.preadv([buffer(PAGE)], 0, time.monotonic() + LONG)) is Miss.SERVER
    assert layer.mount.breaker.state is State.CLOSED
    file.close()
