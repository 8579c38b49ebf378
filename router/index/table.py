"""Keys by number: an open-addressing hash table over columns, 16 bytes of each key.

A key gets a small number (its entry), by which the index keeps whatever else it knows of it. Half of a key is kept: 128
bits of a SHA-256 chain, so two prompts meet by chance about once in 10^38, and then one hint is wrong, which prefill,
who compares whole keys, finds out (L3). Columns are reserved for the most entries at once and take memory only as they
are used: a fresh entry touches the next page, and growing copies the table of numbers alone (4 bytes a place).

Single keys go through memoryviews (an access costs 40 ns, an array's 100 ns), many through numpy, all probes at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from headrace.kvcache.keys import KEY_BYTES, Key

Entries = npt.NDArray[np.int64]
"""Numbers of entries; −1: none."""
KEPT_BYTES: Final = 16
FEW: Final = 48
"""Up to so many keys are looked up one by one: numpy's calls cost more below."""
_EMPTY: Final = -1
_TAIL: Final = 12
"""So few that are left over by probing in columns are ended one by one."""
_LEAST_PLACES: Final = 1024
_PAIR: Final = struct.Struct("<QQ")


class KeyTable:
    """Numbers from 0 on for keys. A number stays with its key until `unlink`; the caller gives numbers out again."""

    BYTES: Final = KEPT_BYTES
    """Per entry, beside the table of numbers."""

    def __init__(self, most_entries: int) -> None:
        self.low = np.empty(most_entries, np.uint64)
        self.high = np.empty(most_entries, np.uint64)
        self._low_view, self._high_view = self.low.data, self.high.data
        self._set_places(np.full(_LEAST_PLACES, _EMPTY, np.int32))
        self.linked = 0
        """Keys in the table."""

    def _set_places(self, places: npt.NDArray[np.int32]) -> None:
        self.places = places
        self._view = places.data
        self._mask = len(places) - 1

    @property
    def places_bytes(self) -> int:
        """Of the table of numbers."""
        return self.places.nbytes

    @property
    def growth_bytes(self) -> int:
        """What the next `link` adds to it."""
        return self.places.nbytes if self._full else 0

    def growth_for(self, count: int) -> int:
        """What linking so many adds."""
        places = len(self.places)
        while 2 * (self.linked + count) > places:
            places *= 2
        return 4 * places - self.places.nbytes

    @property
    def _full(self) -> bool:
        return 2 * self.linked >= len(self.places)

    def find(self, key: Key) -> int:
        """The key's number, or −1."""
        low, high = _PAIR.unpack_from(key)
        view, mask, lows = self._view, self._mask, self._low_view
        place = low & mask
        entry: int
        while (entry := view[place]) >= 0:
            if lows[entry] == low and self._high_view[entry] == high:
                return entry
            place = (place + 1) & mask
        return _EMPTY

    def find_many(self, keys: Sequence[Key]) -> Entries:
        """Numbers of keys, in order; −1 for unknown ones. Raises ValueError for keys of another size."""
        if len(keys) <= FEW:
            return np.array([self.find(key) for key in keys], np.int64)
        low, high = halves(keys)
        return self.find_halves(low, high)

    def find_halves(self, low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]) -> Entries:
        """The same for keys as columns of their two kept halves."""
        mask = np.uint64(self._mask)
        place = (low & mask).astype(np.int64)
        found = self.places[place].astype(np.int64)
        # Those that met another key look one place further, all at once, until they are few.
        wrong = ((found >= 0) & ((self.low[found] != low) | (self.high[found] != high))).nonzero()[0]
        while len(wrong) > _TAIL:
            place[wrong] = (place[wrong] + 1) & self._mask
            there = self.places[place[wrong]].astype(np.int64)
            found[wrong] = there
            differs = (there >= 0) & ((self.low[there] != low[wrong]) | (self.high[there] != high[wrong]))
            wrong = wrong[differs]
        view, lows, highs = self._view, self._low_view, self._high_view
        for at in wrong.tolist():
            spot, wanted, rest = int(place[at]), int(low[at]), int(high[at])
            while True:
                spot = (spot + 1) & self._mask
                entry = view[spot]
                if entry < 0 or (lows[entry] == wanted and highs[entry] == rest):
                    break
            found[at] = entry
        return found

    def link(self, key: Key, entry: int) -> None:
        """Give a key that has none a number."""
        if self._full:
            self._grow()
        low, high = _PAIR.unpack_from(key)
        self._low_view[entry], self._high_view[entry] = low, high
        view, mask = self._view, self._mask
        place = low & mask
        while view[place] >= 0:
            place = (place + 1) & mask
        view[place] = entry
        self.linked += 1

    def link_many(self, low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64], entries: Entries) -> None:
        """The same for halves of different keys, none of which has a number."""
        while 2 * (self.linked + len(entries)) > len(self.places):
            self._grow()
        self.low[entries], self.high[entries] = low, high
        self._settle(entries)
        self.linked += len(entries)

    def unlink(self, entry: int) -> None:
        """Forget a key. Those behind it move up, so that no gravestones lengthen later searches."""
        view, mask, lows = self._view, self._mask, self._low_view
        hole = lows[entry] & mask
        while view[hole] != entry:
            hole = (hole + 1) & mask
        place = hole
        while (other := view[place := (place + 1) & mask]) >= 0:
            home = lows[other] & mask
            if (place - home) & mask >= (place - hole) & mask:
                view[hole] = other
                hole = place
        view[hole] = _EMPTY
        self.linked -= 1

    def _grow(self) -> None:
        entries = self.places[self.places >= 0].astype(np.int64)
        self._set_places(np.full(2 * len(self.places), _EMPTY, np.int32))
        self._settle(entries)

    def _settle(self, entries: Entries) -> None:
        """Put linked entries into the table: everyone takes its place if it is free; of several one wins, the others
        go on to the next place."""
        place = (self.low[entries] & np.uint64(self._mask)).astype(np.int64)
        while len(entries) > _TAIL:
            free = self.places[place] < 0
            self.places[place[free]] = entries[free]
            lost = self.places[place] != entries
            entries, place = entries[lost], (place[lost] + 1) & self._mask
        view = self._view
        for entry, spot in zip(entries.tolist(), place.tolist(), strict=True):
            while view[spot] >= 0:
                spot = (spot + 1) & self._mask
            view[spot] = entry


def halves(keys: Sequence[Key]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """What is kept of keys, as columns. Raises ValueError for keys of another size than 32 bytes."""
    joined = b"".join(keys)
    if len(joined) != KEY_BYTES * len(keys):
        raise ValueError(f"{len(keys)} keys have {len(joined)} bytes together; each must have {KEY_BYTES}")
    columns = np.frombuffer(joined, "<u8").reshape(len(keys), KEY_BYTES // 8)
    return np.ascontiguousarray(columns[:, 0]), np.ascontiguousarray(columns[:, 1])
