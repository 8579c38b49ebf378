"""Lists of a holder's entries: what went in comes out, in whatever order, in few bytes where numbers follow."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.index.lists import EntryList

runs = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=20)


@given(runs, st.booleans())
def test_gives_back_what_it_got(parts: list[tuple[int, int]], at_once: bool) -> None:
    entries, listed, nbytes = EntryList(), [], 0
    for begin, count in parts:
        part = list(range(begin, begin + count))
        listed += part
        nbytes += entries.extend(part) if at_once else sum(entries.append(each) for each in part)
    assert entries.entries().tolist() == sorted(set(listed))
    assert (entries.listed, entries.nbytes) == (len(listed), nbytes)


@given(st.sets(st.integers(0, 80)), st.lists(st.integers(0, 80)))
def test_goes_on_after_it_was_written_anew(kept: set[int], more: list[int]) -> None:
    entries = EntryList()
    entries.extend(range(100))
    before = entries.nbytes
    assert entries.replace(np.array(sorted(kept), np.int64)) == entries.nbytes - before
    assert entries.listed == len(kept)
    for each in more:
        entries.append(each)
    assert entries.entries().tolist() == sorted(kept | set(more))


def test_numbers_that_follow_take_no_memory() -> None:
    entries = EntryList()
    for begin in range(0, 6400, 64):
        entries.extend(list(range(begin, begin + 64)))
    assert entries.nbytes == 8
