"""What each holder has: how many entries, and their list, so that removing a replica costs what it held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.router.index.entries import KeyEntries
from headrace.router.index.lists import EntryList
from headrace.router.index.runs import RUN, TIER_BITS, HolderRuns
from headrace.router.index.table import Entries

_SLACK: Final = 256
"""Entries that a holder's list may have beyond one and a half times those it holds."""


class Holdings:
    """Lists by holder, over the entries' words."""

    def __init__(self, entries: KeyEntries, runs: HolderRuns) -> None:
        self._entries = entries
        self._runs = runs
        self._lists: dict[int, EntryList] = {}
        self._counts: dict[int, int] = {}
        self.pairs = 0
        """Of key and holder."""
        self.nbytes = 0

    def count(self, holder: int) -> int:
        """Keys that it holds."""
        return self._counts.get(holder, 0)

    def gained(self, holder: int, entries: Sequence[int]) -> None:
        """It holds these, which it did not."""
        if not entries:
            return
        held = self._lists.get(holder)
        if held is None:
            held = self._lists[holder] = EntryList()
        self.nbytes += held.append(entries[0]) if len(entries) == 1 else held.extend(entries)
        self.pairs += len(entries)
        self._counts[holder] = self._counts.get(holder, 0) + len(entries)

    def lost(self, holder: int, entries: int) -> None:
        """It holds so many entries less; their words say so already."""
        if entries == 0:
            return
        self.pairs -= entries
        count = self._counts[holder] - entries
        if count == 0:
            del self._counts[holder]
            self.nbytes -= self._lists.pop(holder).nbytes
            return
        self._counts[holder] = count
        if 2 * self._lists[holder].listed > 3 * count + 2 * _SLACK:
            self.tidy(holder)

    def entries(self, holder: int) -> Entries:
        """Numbers of the entries that it holds, ascending. A list may name others too, left behind by removals."""
        listed = self._lists[holder].entries()
        words = self._entries.words[listed]
        mine = (words >> TIER_BITS == holder) & (words != 0)
        several = (words >= RUN).nonzero()[0]
        if len(several):
            positions, held = self._runs.pairs(words[several])
            mine[several] = False
            mine[several[positions[held >> TIER_BITS == holder]]] = True
        entries: Entries = listed[mine]
        return entries

    def tidy(self, holder: int) -> None:
        """Write its list anew, without what removals left behind."""
        self.nbytes += self._lists[holder].replace(self.entries(holder))

    def tidy_loose(self) -> None:
        """Those lists of which a ninth or more is left behind."""
        for holder in [each for each, count in self._counts.items() if 8 * self._lists[each].listed > 9 * count]:
            self.tidy(holder)
