"""One ring over the double: order, deadlines, late completions, holes."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.kvcache.store.threefs.abi import Library
from headrace.kvcache.store.threefs.ring import Ring
from tests.kvcache.store.threefs.usrbio_double import Double, fails

SLOT = 4096
SOON = 0.05
LONG = 60.0


@contextmanager
def opened(library: Library, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    fd = os.open(path, flags)
    library.register(fd)
    try:
        yield fd
    finally:
        library.deregister(fd)
        os.close(fd)


@contextmanager
def ring_of(double: Double, mount: Path, *, read: bool = True, slots: int = 8) -> Iterator[tuple[Library, Ring]]:
    library = Library(str(double.path))
    ring = Ring(library, str(mount), read=read, slots=slots, slot_bytes=SLOT)
    try:
        yield library, ring
    finally:
        assert ring.close(LONG)


def wait_for(condition: object, limit_s: float = LONG) -> None:
    until = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, "did not come true"
        time.sleep(0.001)  # the condition is what is waited for; spinning would starve who brings it about


def buffer(size: int) -> memoryview:
    return memoryview(bytearray(size))


def deadline(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


def test_reads_of_many_threads_get_their_own_bytes_in_whatever_order_they_end(double: Double, mount: Path) -> None:
    """Matched by userdata, never by position: completions are shuffled, and each read must match its own offset."""
    data = random.Random(3).randbytes(64 * SLOT)
    (mount / "f").write_bytes(data)
    double.set(delay_us=100, jitter_us=3000, seed=7, stray=1)
    with ring_of(double, mount, slots=64) as (library, ring), opened(library, mount / "f") as fd:
        wrong: list[int] = []

        def read(seed: int) -> None:
            chooser = random.Random(seed)
            for _ in range(12):
                offset, size = chooser.randrange(0, 48 * SLOT), chooser.randrange(1, 6 * SLOT)
                parts = [buffer(size // 3), buffer(size - size // 3)]
                count = ring.transfer(fd, parts, offset, deadline())
                if count != size or b"".join(parts) != data[offset : offset + size]:
                    wrong.append(offset)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = ring.stats
        assert wrong == []
        assert stats.held_slots == 0
        assert stats.in_flight == 0
        assert stats.late == 0
        assert stats.stray > 0  # what nobody asked for was ignored


def test_writes_land_where_they_belong(double: Double, mount: Path) -> None:
    data = random.Random(5).randbytes(20 * SLOT + 77)
    double.set(jitter_us=1500)
    with ring_of(double, mount, read=False) as (library, ring), opened(library, mount / "f") as fd:
        parts = [memoryview(data)[:5000], memoryview(data)[5000:5001], memoryview(data)[5001:]]
        assert ring.transfer(fd, parts, 3 * SLOT, deadline()) == len(data)  # more than the ring holds: in rounds
    assert (mount / "f").read_bytes() == bytes(3 * SLOT) + data


def test_a_late_read_ends_at_its_deadline_and_lands_in_no_buffer_of_a_caller(double: Double, mount: Path) -> None:
    """L6, L7: the slot stays with its I/O until that is terminal; then it is free again, exactly once."""
    (mount / "f").write_bytes(b"x" * 4 * SLOT)
    with ring_of(double, mount, slots=8) as (library, ring), opened(library, mount / "f") as fd:
        double.set(hold=1)
        target = buffer(3 * SLOT)
        with pytest.raises(TimeoutError):
            ring.transfer(fd, [target], 0, deadline(SOON))
        assert ring.stats.held_slots == 3
        double.set(hold=0)
        other = buffer(4 * SLOT)
        assert ring.transfer(fd, [other], 0, deadline()) == 4 * SLOT  # the rest of the pool still serves
        double.set(release=3)
        wait_for(lambda: ring.stats.held_slots == 0)
        assert ring.stats.late == 3
        assert bytes(target) == bytes(3 * SLOT)


def test_late_slots_are_bounded_and_then_the_answer_is_busy(double: Double, mount: Path) -> None:
    """L12: nothing waits for buffers that late I/O holds."""
    (mount / "f").write_bytes(b"x" * SLOT)
    with ring_of(double, mount, slots=4) as (library, ring), opened(library, mount / "f") as fd:
        double.set(hold=1)
        for _ in range(4):
            with pytest.raises(TimeoutError):
                ring.transfer(fd, [buffer(SLOT)], 0, deadline(0.01))
        with fails(errno.EBUSY):
            ring.transfer(fd, [buffer(SLOT)], 0, deadline())
        assert ring.stats.held_slots == 4
        double.set(hold=0, release=4)
        wait_for(lambda: ring.stats.held_slots == 0)
        assert ring.transfer(fd, [buffer(SLOT)], 0, deadline()) == SLOT


def test_holes_are_errors_and_never_zeros(double: Double, mount: Path) -> None:
    """L3. A gap with data behind it is ENODATA inside one piece, where 3FS sees it, and between two, where the ring
    does; a gap up to the end of what was asked is short, as in 3FS."""
    double.set(chunk_bytes=SLOT)
    with open(mount / "f", "wb") as file:
        file.truncate(16 * SLOT)
        for chunk in (0, 3, 4):
            os.pwrite(file.fileno(), b"d" * SLOT, chunk * SLOT)
    with opened(Library(str(double.path)), mount / "f") as fd:
        with ring_of(double, mount) as (_, ring):
            with fails(errno.ENODATA):
                ring.transfer(fd, [buffer(5 * SLOT)], 0, deadline())
            assert ring.transfer(fd, [buffer(2 * SLOT)], 0, deadline()) == SLOT
            assert ring.transfer(fd, [buffer(2 * SLOT)], 8 * SLOT, deadline()) == 0
        library = Library(str(double.path))
        wide = Ring(library, str(mount), read=True, slots=2, slot_bytes=16 * SLOT)
        with fails(errno.ENODATA):
            wide.transfer(fd, [buffer(5 * SLOT)], 0, deadline())
        assert wide.close(LONG)


@pytest.mark.parametrize("code", [errno.EIO, errno.EREMOTEIO, errno.ENOSPC])
def test_one_failed_piece_fails_the_transfer_and_frees_every_slot(double: Double, mount: Path, code: int) -> None:
    (mount / "f").write_bytes(b"x" * 8 * SLOT)
    with ring_of(double, mount) as (library, ring), opened(library, mount / "f") as fd:
        double.set(fail_every=3, fail_errno=code, jitter_us=500)
        for _ in range(5):
            with fails(code):
                ring.transfer(fd, [buffer(6 * SLOT)], 0, deadline())
        assert ring.stats.held_slots == 0


def test_short_results_are_short_or_holes_but_never_padded(double: Double, mount: Path) -> None:
    (mount / "f").write_bytes(b"x" * 8 * SLOT)
    with ring_of(double, mount) as (library, ring), opened(library, mount / "f") as fd:
        double.set(short_every=1)
        assert ring.transfer(fd, [buffer(SLOT)], 0, deadline()) == SLOT // 2
        with fails(errno.ENODATA):
            ring.transfer(fd, [buffer(2 * SLOT)], 0, deadline())


def test_the_wrong_descriptor_leaves_nothing_held(double: Double, mount: Path) -> None:
    """L10: a rejection releases everything, also when some pieces were prepared before it."""
    (mount / "f").write_bytes(b"x" * 8 * SLOT)
    with ring_of(double, mount) as (library, ring):
        with fails(errno.EBADF):
            ring.transfer(987, [buffer(3 * SLOT)], 0, deadline())
        assert ring.stats.held_slots == 0
        with opened(library, mount / "f", os.O_WRONLY) as fd, fails(errno.EACCES):
            ring.transfer(fd, [buffer(3 * SLOT)], 0, deadline())
        assert ring.stats.held_slots == 0
        assert ring.stats.in_flight == 0


def test_closing_waits_for_those_inside_and_then_refuses(double: Double, mount: Path) -> None:
    (mount / "f").write_bytes(b"x" * SLOT)
    library = Library(str(double.path))
    ring = Ring(library, str(mount), read=True, slots=4, slot_bytes=SLOT)
    with opened(library, mount / "f") as fd:
        double.set(hold=1)
        got: list[int] = []
        reader = threading.Thread(target=lambda: got.append(ring.transfer(fd, [buffer(SLOT)], 0, deadline())))
        reader.start()
        wait_for(lambda: double.get("held") == 1)
        assert not ring.close(0.0)  # somebody is inside: nothing was destroyed under him
        double.set(hold=0, release=1)
        reader.join()
        assert got == [SLOT]
        with fails(errno.ENOTCONN):
            ring.transfer(fd, [buffer(SLOT)], 0, deadline())
    assert ring.close(LONG)


def test_memory_may_be_given_back_while_late_io_is_away(double: Double, mount: Path) -> None:
    """The FUSE process has its own mapping; ours is gone after close, and a write to it would crash this test."""
    (mount / "f").write_bytes(b"x" * SLOT)
    with ring_of(double, mount) as (library, ring), opened(library, mount / "f") as fd:
        double.set(hold=1)
        with pytest.raises(TimeoutError):
            ring.transfer(fd, [buffer(SLOT)], 0, deadline(0.01))
    double.set(hold=0, release=1)
    wait_for(lambda: double.get("inflight") == 0)
