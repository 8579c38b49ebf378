"""The arena of direct IO buffers against a plain twin."""

from __future__ import annotations

import ctypes
import threading

from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.store.segments.buffers import Buffer, BufferPool
from headrace.kvcache.store.segments.record import ALIGN
from tests.kvcache.store.entries import soon

PAGES = 16


@given(st.lists(st.tuples(st.booleans(), st.integers(1, PAGES)), max_size=80))
def test_buffers_never_overlap_and_all_come_back(steps: list[tuple[bool, int]]) -> None:
    """L11. The twin is a list of pages with their holders: a buffer comes if enough of them are free in a row."""
    pool = BufferPool(PAGES * ALIGN)
    pages: list[Buffer | None] = [None] * PAGES
    held: list[Buffer] = []
    for take, number in steps:
        if take:
            free = "".join("." if holder is None else "x" for holder in pages)
            buffer = pool.take(number * ALIGN - 5)
            assert (buffer is not None) == ("." * number in free)
            if buffer is not None:
                start = buffer.start // ALIGN
                assert free[start : start + number] == "." * number
                pages[start : start + number] = [buffer] * number
                held.append(buffer)
        elif held:
            buffer = held.pop(number % len(held))
            pages = [None if holder is buffer else holder for holder in pages]
            pool.give(buffer)
        assert pool.taken == sum(holder is not None for holder in pages) * ALIGN
    for buffer in held:
        pool.give(buffer)
    assert pool.taken == 0
    whole = pool.take(PAGES * ALIGN)
    assert whole is not None
    assert whole.size == PAGES * ALIGN


def test_buffers_are_aligned_and_apart() -> None:
    pool = BufferPool(8 * ALIGN)
    first, second = pool.take(2 * ALIGN), pool.take(1)
    assert first is not None
    assert second is not None
    for buffer in (first, second):
        assert ctypes.addressof(ctypes.c_char.from_buffer(buffer.view)) % ALIGN == 0
    first.view[:] = b"a" * first.size
    second.array[:] = 7
    assert bytes(first.view) == b"a" * first.size
    assert bytes(second.view) == b"\7" * ALIGN


def test_one_larger_than_the_pool_never_comes() -> None:
    """L12: no row of an index, however wrong, makes a read take more memory than all buffers."""
    pool = BufferPool(4 * ALIGN)
    assert pool.take(5 * ALIGN, soon()) is None
    assert pool.take(4 * ALIGN) is not None


def test_whoever_waits_gets_what_is_given_back() -> None:
    pool = BufferPool(2 * ALIGN)
    held = pool.take(2 * ALIGN)
    assert held is not None
    got: list[Buffer | None] = []
    waiting = threading.Thread(target=lambda: got.append(pool.take(ALIGN, soon())))
    waiting.start()
    pool.give(held)
    waiting.join()
    assert got[0] is not None
    assert pool.take(2 * ALIGN, soon(-1.0)) is None
