"""The entries of one holder, in the order they came: what removing a replica walks.

Numbers that follow each other, as those of a prompt's blocks do, stand as one range of two words; others take four
bytes each. Removals leave a number where it is; the owner writes the list anew when too many are left behind.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import lt
from typing import Final

import numpy as np

from headrace.router.index.table import Entries

_RANGE: Final = 1 << 31
"""Marks a range's first word; its last entry follows."""


class EntryList:
    """Entries below 2³¹."""

    __slots__ = ("_next", "_open", "_words", "listed")

    def __init__(self) -> None:
        self._words: array[int] = array("I")
        self._next = -1
        self._open = False
        self.listed = 0
        """Entries in it, those that are left behind and those that came twice included."""

    @property
    def nbytes(self) -> int:
        return 4 * len(self._words)

    def append(self, entry: int) -> int:
        """Returns the bytes that it took."""
        words = self._words
        self.listed += 1
        follows = entry == self._next
        self._next = entry + 1
        if follows and self._open:
            words[-1] = entry
            return 0
        if follows:
            words[-1] |= _RANGE
        self._open = follows
        words.append(entry)
        return 4

    def extend(self, entries: Sequence[int]) -> int:
        """Several at once; returns the bytes that they took. Those that follow each other cost one step."""
        before = self.nbytes
        if len(entries) > 1 and entries[-1] - entries[0] == len(entries) - 1 and _ascends(entries):
            self.append(entries[0])
            self.append(entries[1])
            self._words[-1] = entries[-1]
            self._next = entries[-1] + 1
            self.listed += len(entries) - 2
        else:
            for entry in entries:
                self.append(entry)
        return self.nbytes - before

    def entries(self) -> Entries:
        """Each once, ascending."""
        words = np.frombuffer(self._words, np.uint32).astype(np.int64)
        first = (words >= _RANGE).nonzero()[0]
        single = np.ones(len(words), np.bool_)
        single[first] = single[first + 1] = False
        begins = words[first] - _RANGE
        lengths = words[first + 1] - begins + 1
        before = np.cumsum(lengths) - lengths
        ranges = np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))
        return np.unique(np.concatenate((words[single], ranges)))

    def replace(self, entries: Entries) -> int:
        """Write it anew with entries that ascend; returns by how many bytes it grew."""
        was = self.nbytes
        if len(entries) == 0:
            self.__init__()  # type: ignore[misc]
            return -was
        breaks = (np.diff(entries) != 1).nonzero()[0]
        begins = entries[np.concatenate(([0], breaks + 1))]
        ends = entries[np.concatenate((breaks, [len(entries) - 1]))]
        ranges = ends > begins
        at = np.cumsum(ranges + 1) - (ranges + 1)
        words = np.empty(int(at[-1]) + 1 + int(ranges[-1]), np.uint32)
        words[at] = begins + ranges * _RANGE
        words[at[ranges] + 1] = ends[ranges]
        self._words = array("I", words.tobytes())
        self._next, self._open, self.listed = int(ends[-1]) + 1, bool(ranges[-1]), len(entries)
        return self.nbytes - was


def _ascends(entries: Sequence[int]) -> bool:
    return all(map(lt, entries, entries[1:]))
