"""Numbers of keys: given to new ones, kept while somebody holds them, given again.

Columns by the entry's number: half a key (table.py), who holds it (runs.py), when it was used (recency.py). An entry
that nobody holds is dead: its number is given to the next new key, and only then the old key leaves the table; so
removals are a few columns' writes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.kvcache.keys import Key
from headrace.router.index.recency import Recency
from headrace.router.index.runs import Words
from headrace.router.index.table import Entries, KeyTable

_COLUMN_BYTES: Final = 5
"""Of `words` and `buried`."""
Forget: TypeAlias = Callable[[int], int]
"""Makes up to so many of the longest unused entries dead, for want of memory."""
ENTRY_BYTES: Final = KeyTable.BYTES + Recency.BYTES + _COLUMN_BYTES


class KeyEntries:
    """All entries. Columns are reserved at once: pages come as they are written."""

    def __init__(self, budget_bytes: int) -> None:
        self.most = budget_bytes // (ENTRY_BYTES + 4)
        self._budget = budget_bytes
        self.table = KeyTable(self.most)
        self.recency = Recency(self.most)
        self.words: Words = np.empty(self.most, np.uint32)
        self.view = self.words.data
        self._buried_column: npt.NDArray[np.uint8] = np.empty(self.most, np.uint8)
        """Whether an entry's number waits to be given out again."""
        self._buried = self._buried_column.data
        self.fresh = 0
        """Entries below it were given out once."""
        self._dead: array[int] = array("I")

    @property
    def nbytes(self) -> int:
        """Columns as far as they were used, and the table."""
        return ENTRY_BYTES * self.fresh + self.table.places_bytes + 4 * len(self._dead)

    @property
    def keys(self) -> int:
        """Keys that somebody holds."""
        return self.table.linked - len(self._dead)

    def alive(self) -> Entries:
        """Entries that somebody holds."""
        entries: Entries = self.words[: self.fresh].nonzero()[0]
        return entries

    def words_of(self, entries: Entries) -> Words:
        """Their words; 0 for entry −1."""
        words: Words = self.words[entries]
        words[entries < 0] = 0
        return words

    def new(self, key: Key, forget: Forget) -> int:
        """A number for a new key: a dead entry's, a fresh one, or that of the longest unused entry."""
        entry = self._reusable()
        if entry is None:
            bytes_after = self.nbytes + ENTRY_BYTES + self.table.growth_bytes
            if self.fresh < self.most and bytes_after <= self._budget:
                entry = self.fresh
                self.view[entry] = 0
                self._buried[entry] = 0
                self.fresh += 1
            else:
                forget(1)
                entry = self._reusable()
                assert entry is not None
        self.table.link(key, entry)
        return entry

    def new_many(self, count: int, forget: Forget) -> Entries:
        """Numbers as `new` gives, for keys that the caller links."""
        numbers: list[int] = []
        while True:
            while len(numbers) < count and (entry := self._reusable()) is not None:
                numbers.append(entry)
            missing = count - len(numbers)
            spare = self._budget - self.nbytes - self.table.growth_for(count)
            fresh = max(0, min(missing, self.most - self.fresh, spare // ENTRY_BYTES))
            if fresh == missing:
                break
            forget(missing - fresh)
        first = self.fresh
        self.fresh += fresh
        self.words[first : self.fresh] = 0
        self._buried_column[first : self.fresh] = 0
        return np.concatenate((np.array(numbers, np.int64), np.arange(first, self.fresh)))

    def bury(self, entry: int) -> None:
        """Nobody holds it. Of an entry that came back to life the number may be in the list already."""
        if not self._buried[entry]:
            self._buried[entry] = 1
            self._dead.append(entry)

    def bury_many(self, entries: Entries) -> None:
        """The same of several."""
        new = entries[self._buried_column[entries] == 0]
        self._buried_column[new] = 1
        self._dead.frombytes(new.astype(np.uint32).tobytes())

    def _reusable(self) -> int | None:
        """A dead entry, whose old key leaves the table now."""
        while self._dead:
            entry = self._dead.pop()
            self._buried[entry] = 0
            if self.view[entry] == 0:
                self.table.unlink(entry)
                return entry
        return None
