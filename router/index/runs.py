"""Who holds an entry: one 32-bit word per entry, and a run of 16-bit words for entries that several hold.

A holder is one number of 14 bits with two bits for its tiers (`holder << 2 | tiers`, never 0). Most entries have one:
it stands in the entry's word. More stand in a run of 2^class places in an arena, packed at the front, zeros behind;
the word then has the top bit, the class and the place. A run that is full moves to one twice as long, so a further
holder costs two to four bytes. Runs are aligned to their length: those of one class are rows of a matrix, which numpy
takes all at once.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

MOST_HOLDERS: Final = 1 << 14
TIER_BITS: Final = 2
TIERS: Final = 3
RUN: Final = 1 << 31
"""Words from here on name a run."""
_CLASS_SHIFT: Final = 27
_OFFSET_MASK: Final = (1 << _CLASS_SHIFT) - 1
_LARGEST: Final = 14
_NONE: Final = _OFFSET_MASK
"""No free run."""
CHUNK: Final = 1 << _LARGEST
"""Places taken from the arena at once: one longest run, or what is halved into shorter ones."""
CHUNK_BYTES: Final = 2 * CHUNK
_LOOP: Final = 8
"""Runs up to so many places are read one by one."""
Words = npt.NDArray[np.uint32]


def run_class(word: int) -> int:
    """log₂ of a run's places."""
    return (word >> _CLASS_SHIFT) & 15


class ArenaFull(Exception):
    """No place for a longer run: forget something first."""


class HolderRuns:
    """Changes words of holders. A word of 0 has none."""

    def __init__(self, most_bytes: int) -> None:
        most = min(most_bytes // CHUNK_BYTES * CHUNK, _OFFSET_MASK // CHUNK * CHUNK * 2)
        self.arena = np.empty(max(most, CHUNK), np.uint16)
        self._view = self.arena.data
        self._top = 0
        self._links = self.arena.view(np.uint32).data
        self._free = [_NONE] * (_LARGEST + 1)
        """First free run of each class, in units of two places; each free run's first two places name the next."""
        self.free_places = 0
        """Of those taken from the arena, in no run."""

    @property
    def nbytes(self) -> int:
        """Memory that runs take or took, free places included."""
        return 2 * self._top

    @property
    def fragmented(self) -> bool:
        """Moving runs together would give back at least a quarter."""
        return self.free_places >= max(CHUNK, self._top // 4)

    # --- one word ------------------------------------------------------------------------------------------------

    def add(self, word: int, entry: int) -> tuple[int, bool]:
        """The word with a holder's tiers added, and whether the holder is new there. Raises ArenaFull."""
        if word == 0:
            return entry, True
        holder = entry & ~TIERS
        if word < RUN:
            if word & ~TIERS == holder:
                return word | entry, False
            offset = self._take(1)
            self._view[offset], self._view[offset + 1] = word, entry
            return _word(offset, 1), True
        size = run_class(word)
        offset = (word & _OFFSET_MASK) << 1
        place, count = self._look(offset, size, holder)
        if place >= 0:
            self._view[place] |= entry
            return word, False
        if count < 1 << size:
            self._view[offset + count] = entry
            return word, True
        longer = self._take(size + 1)
        self.arena[longer : longer + count] = self.arena[offset : offset + count]
        self.arena[longer + count : longer + 2 * count] = 0
        self._view[longer + count] = entry
        self._give(offset, size)
        return _word(longer, size + 1), True

    def remove(self, word: int, entry: int) -> tuple[int, bool]:
        """The word without these tiers of a holder, and whether the holder has left it. Unknown ones change nothing."""
        holder, tiers = entry & ~TIERS, entry & TIERS
        if word < RUN:
            if word == 0 or word & ~TIERS != holder:
                return word, False
            word &= ~tiers
            return (word, False) if word & TIERS else (0, True)
        size = run_class(word)
        offset = (word & _OFFSET_MASK) << 1
        place, count = self._look(offset, size, holder)
        if place < 0:
            return word, False
        left = self._view[place] & ~tiers
        if left & TIERS:
            self._view[place] = left
            return word, False
        last = offset + count - 1
        self._view[place] = self._view[last]
        self._view[last] = 0
        return self._shorter(offset, size, count - 1), True

    def free(self, word: int) -> None:
        """The entry is forgotten."""
        if word >= RUN:
            self._give((word & _OFFSET_MASK) << 1, run_class(word))

    def holders(self, word: int) -> list[int]:
        """`holder << 2 | tiers` of each."""
        if word < RUN:
            return [word] if word else []
        size = run_class(word)
        offset = (word & _OFFSET_MASK) << 1
        if size > 3:
            run = self.arena[offset : offset + (1 << size)]
            return [int(held) for held in run[: int(np.count_nonzero(run))].tolist()]
        return [held for held in self._view[offset : offset + (1 << size)].tolist() if held]

    # --- many words ------------------------------------------------------------------------------------------------

    def pairs(self, words: Words) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
        """Every holder of every word: positions in `words` and `holder << 2 | tiers`, in no order."""
        single = ((words != 0) & (words < RUN)).nonzero()[0]
        positions = [single.astype(np.int32)]
        held = [words[single].astype(np.uint16)]
        several = (words >= RUN).nonzero()[0]
        if len(several):
            sizes = (words[several] >> _CLASS_SHIFT) & 15
            for size in np.unique(sizes).tolist():
                of_class = several[sizes == size]
                rows = (words[of_class] & _OFFSET_MASK) >> (size - 1)
                found = self._matrix(size)[rows].reshape(-1)
                places = found.nonzero()[0]
                positions.append(of_class[places >> size].astype(np.int32))
                held.append(found[places])
        if len(held) == 1:
            return positions[0], held[0]
        return np.concatenate(positions), np.concatenate(held)

    def compact(self, words: Words) -> None:
        """Move all runs together; `words` (of all entries) are changed where they name one."""
        arena = np.empty_like(self.arena)
        top = 0
        runs = (words >= RUN).nonzero()[0]
        sizes = (words[runs] >> _CLASS_SHIFT) & 15
        # Longest first keeps every run aligned to its length.
        for size in range(_LARGEST, 0, -1):
            of_class = runs[sizes == size]
            if len(of_class) == 0:
                continue
            old = (words[of_class] & _OFFSET_MASK) >> (size - 1)
            count = len(of_class) << size
            arena[top : top + count] = self._matrix(size)[old].reshape(-1)
            offsets = (top + (np.arange(len(of_class)) << size)).astype(np.uint32)
            words[of_class] = np.uint32(RUN | size << _CLASS_SHIFT) | (offsets >> 1)
            top += count
        self.arena, self._view, self._links = arena, arena.data, arena.view(np.uint32).data
        self._free = [_NONE] * (_LARGEST + 1)
        self.free_places = 0
        self._top = -(-top // CHUNK) * CHUNK
        self._halve(top, self._top)

    # --- places ----------------------------------------------------------------------------------------------------

    def _matrix(self, size: int) -> npt.NDArray[np.uint16]:
        return self.arena[: len(self.arena) >> size << size].reshape(-1, 1 << size)

    def _look(self, offset: int, size: int, holder: int) -> tuple[int, int]:
        """The holder's place, or −1; how many holders were seen: all, where it is −1 or the run is long."""
        count = 1 << size
        if count <= _LOOP:
            for seen in range(count):
                held = self._view[offset + seen]
                if held == 0:
                    return -1, seen
                if held & ~TIERS == holder:
                    return offset + seen, seen + sum(1 for each in self._view[offset + seen : offset + count] if each)
            return -1, count
        run = self.arena[offset : offset + count]
        count = int(np.count_nonzero(run))
        places = ((run[:count] & (~TIERS & 0xFFFF)) == holder).nonzero()[0]
        return (offset + int(places[0]) if len(places) else -1), count

    def _shorter(self, offset: int, size: int, count: int) -> int:
        """The word of a run that has lost a holder: one holder needs none, a quarter of the places half of them."""
        if count == 1:
            word = self._view[offset]
            self._give(offset, size)
            return word
        if size > 1 and count <= 1 << (size - 2):
            self._give(offset + (1 << (size - 1)), size - 1)
            return _word(offset, size - 1)
        return _word(offset, size)

    def _take(self, size: int) -> int:
        """A run's first place; a run of two is not cleared, since both are written at once."""
        if size > _LARGEST:
            raise ValueError(f"an entry has at most {MOST_HOLDERS} holders")
        larger = size
        while larger <= _LARGEST and self._free[larger] == _NONE:
            larger += 1
        if larger > _LARGEST:
            if self._top + CHUNK > len(self.arena):
                raise ArenaFull
            self._give(self._top, _LARGEST)
            self._top += CHUNK
            larger = _LARGEST
        unit = self._free[larger]
        self._free[larger] = self._links[unit]
        offset = unit << 1
        self.free_places -= 1 << larger
        while larger > size:
            larger -= 1
            self._give(offset + (1 << larger), larger)
        return offset

    def _give(self, offset: int, size: int) -> None:
        self._links[offset >> 1] = self._free[size]
        self._free[size] = offset >> 1
        self.free_places += 1 << size

    def _halve(self, begin: int, end: int) -> None:
        """Free places [begin, end) as runs, each aligned to its length."""
        while begin < end:
            size = min(_LARGEST, (begin & -begin).bit_length() - 1) if begin else _LARGEST
            while begin + (1 << size) > end:
                size -= 1
            self._give(begin, size)
            begin += 1 << size


def _word(offset: int, size: int) -> int:
    return RUN | size << _CLASS_SHIFT | offset >> 1
