"""Readers, writers and closings while the mount delays, fails, holds back, vanishes and returns."""

from __future__ import annotations

import functools
import random
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from headrace.kvcache.store.threefs.breaker import BreakerSettings, State
from headrace.kvcache.store.threefs.layer import ThreeFsLayer
from tests.kvcache.store.threefs.conftest import settings_of
from tests.kvcache.store.threefs.test_ring import buffer, wait_for
from tests.kvcache.store.threefs.usrbio_double import Double, descriptors

PAGE = 4096
PAGES = 64


@functools.cache
def page_of(file: int, number: int) -> bytes:
    return random.Random(file * 1000 + number).randbytes(PAGE)


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_leaves_no_wrong_byte_no_slot_and_no_descriptor(double: Double, mount: Path, seed: int) -> None:
    """L3, L6, L7: whatever comes is the page that was asked for; at the end nothing is held, and all is read."""
    (mount / "store").mkdir()
    chooser = random.Random(seed)
    breaker = BreakerSettings(timeouts_in_row=4, first_pause_s=0.01, longest_pause_s=0.02)
    settings = settings_of(
        double, slot_bytes=1 << 13, read_bytes=1 << 17, io_timeout_s=0.3, name_timeout_s=1.0, breaker=breaker
    )
    before = descriptors()
    layer = ThreeFsLayer(str(mount / "store"), settings)
    for file in range(3):
        opened = layer.create(f"f{file}", direct=True)
        for number in range(PAGES):
            opened.pwritev([memoryview(page_of(file, number))], number * PAGE)
        opened.close()
    wrong: list[str] = []
    stop = threading.Event()

    def read(me: int) -> None:
        mine = random.Random(seed * 100 + me)
        target = buffer(4 * PAGE)
        while not stop.is_set():
            file, number, count = mine.randrange(3), mine.randrange(PAGES - 4), mine.randrange(1, 5)
            try:
                opened = layer.open(f"f{file}", direct=True, deadline=time.monotonic() + 0.05)
                try:
                    for _ in range(mine.randrange(1, 4)):
                        deadline = time.monotonic() + mine.choice([0.0, 0.002, 0.05])
                        got = opened.preadv([target[: count * PAGE]], number * PAGE, deadline)
                        wanted = b"".join(page_of(file, number + i) for i in range(count))
                        if bytes(target[:got]) != wanted[:got]:
                            wrong.append(f"page {number} of file {file}")
                finally:
                    opened.close()
            except OSError:
                stop.wait(0.001)

    def write(me: int) -> None:
        made = 0
        while not stop.is_set():
            made += 1
            try:
                opened = layer.create(f"w{me}-{made}", direct=True)
                try:
                    opened.pwritev([memoryview(page_of(me, made))] * 3, 0)
                    opened.datasync()
                finally:
                    opened.close()
            except OSError:
                stop.wait(0.001)

    threads = [threading.Thread(target=read, args=(me,)) for me in range(3)]
    threads.append(threading.Thread(target=write, args=(9,)))
    for thread in threads:
        thread.start()
    for _ in range(25):
        double.set(
            hold=chooser.choice([0, 0, 0, 1]),
            jitter_us=chooser.choice([0, 500, 4000]),
            fail_every=chooser.choice([0, 0, 7]),
            short_every=chooser.choice([0, 0, 5]),
            stray=chooser.choice([0, 1]),
            mounted=chooser.choice([1, 1, 1, 1, 0]),
        )
        stop.wait(0.02)
        double.set(release=chooser.randrange(40))
    double.reset()
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    # On a busy machine probes may have failed too, and the pause between them grown to half a minute.
    wait_for(lambda: layer.mount.breaker.state is State.CLOSED and layer.stats.name_calls == 0, 90.0)

    def settled() -> bool:
        # What the storm's last mount had taken is never answered, and only who uses the rings notices.
        with suppress(OSError), closing(layer.open("f0", direct=True)) as opened:
            opened.preadv([buffer(PAGE)], 0, time.monotonic() + 0.05)
        with suppress(OSError), closing(layer.create(f"s{time.monotonic_ns()}", direct=True)) as opened:
            opened.pwritev([memoryview(page_of(0, 0))], 0)
        return layer.stats.reads.held_slots == 0 and layer.stats.writes.held_slots == 0

    wait_for(settled)
    for file in range(3):
        opened = layer.open(f"f{file}", direct=True)
        whole = buffer(PAGES * PAGE)
        assert opened.preadv([whole], 0, time.monotonic() + 30.0) == PAGES * PAGE
        assert bytes(whole) == b"".join(page_of(file, number) for number in range(PAGES))
        opened.close()
    layer.close()
    # A registration whose file was closed while the mount was gone keeps the library's duplicate until its number is
    # used again; nothing of ours stays open.
    assert descriptors() <= before + double.get("registered") + 4
