"""The index of all ranks' own tiers, compact: what the prefill balancer asks once per request.

Columns by the entry's number: half a key (table.py), who holds it (runs.py), when it was used (recency.py). Each holder
has the list of its entries, so that removing a replica costs what it held. An entry that nobody holds is dead: its
number is given to the next new key, and only then the old key leaves the table; so removals are a few columns' writes.

The byte budget is divided: three fifths for keys, two for holders. Each part forgets the longest unused entries when it
is full; columns are reserved at once and take memory as they are used.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from headrace.kvcache.keys import KEY_BYTES, Key
from headrace.router.index.base import NOTHING_STORED, HolderTier, PrefixMatch, StorePrefix
from headrace.router.index.bulk import MANY, joined, left
from headrace.router.index.chains import chain_lengths
from headrace.router.index.lists import EntryList
from headrace.router.index.match import FEW_BLOCKS, many_holders, match_few, match_many, words_of
from headrace.router.index.recency import Recency
from headrace.router.index.runs import CHUNK_BYTES, MOST_HOLDERS, RUN, TIER_BITS, TIERS, ArenaFull, HolderRuns, Words
from headrace.router.index.table import Entries, KeyTable, halves

LEAST_BUDGET: Final = 1 << 18
_KEYS_SHARE: Final = 0.6
_EVICTED: Final = 32
"""Entries forgotten at once when holders' memory is full."""
_KEPT_EMPTY: Final = 1024
"""Dead entries that an empty index may keep."""
_SLACK: Final = 256
"""Entries that a holder's list may have beyond one and a half times those it holds."""


class BlockIndex:
    """PrefixIndex (base.py)."""

    def __init__(self, budget_bytes: int) -> None:
        """Raises ValueError for a budget below 256 KiB."""
        if budget_bytes < LEAST_BUDGET:
            raise ValueError(f"budget_bytes {budget_bytes} must be at least {LEAST_BUDGET}")
        self._keys_budget = int(budget_bytes * _KEYS_SHARE)
        self._holders_budget = budget_bytes - self._keys_budget
        self.ranks = 0
        """Entries of a match's columns: one more than the highest rank number seen; callers may raise it."""
        self.forgotten = 0
        """Entries that left for want of memory."""
        self._start()

    def _start(self) -> None:
        """All memory at its least. Columns are reserved: pages come as they are written."""
        most = self._keys_budget // (_ENTRY_BYTES + 4)
        self._table = KeyTable(most)
        self._recency = Recency(most)
        self._columns = _Columns(most)
        self._most = most
        self._runs = HolderRuns(self._holders_budget)
        self._held: dict[int, EntryList] = {}
        self._counts: dict[int, int] = {}
        self._fresh = 0
        self._dead: array[int] = array("I")
        self._entries = 0
        self._lists_bytes = 0

    def _give_back(self) -> None:
        """Nobody holds anything: let memory go, unless it is next to nothing."""
        if self._fresh > _KEPT_EMPTY:
            self._start()

    # --- what changes --------------------------------------------------------------------------------------------

    def stored(self, holder: int, tier: HolderTier, keys: Sequence[Key]) -> None:
        """See PrefixIndex. Raises ValueError for keys that are not 32 bytes and holders outside 14 bits."""
        bits = self._entry(holder, tier)
        _check(keys)
        if MANY <= len(keys) < self._most // 4 and len(set(keys)) == len(keys):
            self._stored_many(holder, bits, keys)
            return
        find, touch = self._table.find, self._recency.touch
        tick = self._recency.begin(len(keys))
        for key in keys:
            entry = find(key)
            if entry < 0:
                entry = self._new(key)
            touch(entry, tick)
            tick -= 1
            self._add(entry, holder, bits)

    def _stored_many(self, holder: int, bits: int, keys: Sequence[Key]) -> None:
        """Different keys, far fewer than the index can hold."""
        columns = self._columns
        low, high = halves(keys)
        entries = self._table.find_halves(low, high)
        known = entries[entries >= 0]
        if len(known):
            # First of all: among them may be dead ones, whose numbers are given away below, and nothing that is used
            # now may be forgotten for the new ones.
            self._recency.touch_many(known)
            columns.words[known], how = joined(columns.words[known], bits)
            self._held_more(holder, known[how == 1].tolist())
            for entry in known[how == 2].tolist():
                self._add(entry, holder, bits)
        new = (entries < 0).nonzero()[0]
        if len(new):
            numbers = self._new_many(len(new))
            self._table.link_many(low[new], high[new], numbers)
            columns.words[numbers] = bits
            entries[new] = numbers
            self._held_more(holder, numbers.tolist())
        self._recency.touch_many(entries)
        if self._holders_bytes + CHUNK_BYTES > self._holders_budget:
            self._make_room(-1)

    def _new_many(self, count: int) -> Entries:
        """As `_new`, but for linking them."""
        numbers: list[int] = []
        while True:
            while len(numbers) < count and (entry := self._reusable()) is not None:
                numbers.append(entry)
            missing = count - len(numbers)
            spare = self._keys_budget - self._keys_bytes - self._table.growth_for(count)
            fresh = max(0, min(missing, self._most - self._fresh, spare // _ENTRY_BYTES))
            if fresh == missing:
                break
            self._forget(missing - fresh)
        first = self._fresh
        self._fresh += fresh
        self._columns.clear_many(first, self._fresh)
        return np.concatenate((np.array(numbers, np.int64), np.arange(first, self._fresh)))

    def _held_more(self, holder: int, entries: Sequence[int]) -> None:
        """It holds these, which it did not."""
        if not entries:
            return
        held = self._held.get(holder)
        if held is None:
            held = self._held[holder] = EntryList()
        self._lists_bytes += held.append(entries[0]) if len(entries) == 1 else held.extend(entries)
        self._entries += len(entries)
        self._counts[holder] = self._counts.get(holder, 0) + len(entries)

    def _removed_many(self, holder: int, bits: int, keys: Sequence[Key]) -> None:
        """Different keys."""
        entries = self._table.find_many(keys)
        entries = entries[entries >= 0]
        words, how = left(self._columns.words[entries], bits)
        self._columns.words[entries] = words
        gone = entries[how == 1]
        self._bury(gone)
        self._lost(holder, len(gone))
        for entry in entries[how == 2].tolist():
            self._remove(entry, holder, bits)

    def removed(self, holder: int, tier: HolderTier, keys: Sequence[Key]) -> None:
        """See PrefixIndex."""
        bits = self._entry(holder, tier)
        _check(keys)
        if len(keys) >= MANY and len(set(keys)) == len(keys):
            self._removed_many(holder, bits, keys)
        else:
            for key in keys:
                entry = self._table.find(key)
                if entry >= 0:
                    self._remove(entry, holder, bits)
        if self._entries == 0:
            self._give_back()

    def clear(self, holder: int, tier: HolderTier = HolderTier.DEVICE | HolderTier.HOST) -> int:
        """See PrefixIndex."""
        bits = self._entry(holder, tier)
        if not self._counts.get(holder):
            return 0
        entries = self._entries_of(holder)
        before = self._counts[holder]
        words = self._columns.words[entries]
        single = words < RUN
        mine, left = entries[single], words[single] & ~np.uint32(bits & TIERS)
        left[(left & TIERS) == 0] = 0
        self._columns.words[mine] = left
        gone = mine[left == 0]
        self._bury(gone)
        self._lost(holder, len(gone))
        for entry in entries[~single].tolist():
            self._remove(entry, holder, bits)
        removed = before - self._counts.get(holder, 0)
        if self._entries == 0:
            self._give_back()
        elif self._counts.get(holder):
            self._list(holder, self._entries_of(holder))
        return removed

    # --- what is asked -------------------------------------------------------------------------------------------

    def match(
        self, blocks: Sequence[Key], snapshots: Sequence[Key] | None, limit: int, store: StorePrefix = NOTHING_STORED
    ) -> PrefixMatch:
        """See PrefixIndex."""
        count = max(0, min(len(blocks), limit))
        look = None if snapshots is None else lambda first: self._look(snapshots[:first])
        if count <= FEW_BLOCKS:
            few = self._look_few(blocks[:count], store.blocks)
            if not any(map(many_holders, few)):
                return match_few(few, look, store, self._runs, self.ranks)
            words = np.array(few, np.uint32)
        else:
            words = words_of(blocks, self._look, count, min(store.blocks, count))
        return match_many(words, look, store, self._runs, self.ranks)

    def _look_few(self, keys: Sequence[Key], stored: int) -> list[int]:
        """Words of a short prompt, until a block that nobody has and that is not among the `stored` first of the
        store; those that somebody holds are used."""
        find, view, touch = self._table.find, self._columns.view, self._recency.touch
        tick = self._recency.begin(len(keys))
        words = []
        for position, key in enumerate(keys):
            entry = find(key)
            word = view[entry] if entry >= 0 else 0
            if word:
                touch(entry, tick - position)
            elif position >= stored:
                break
            words.append(word)
        return words

    def _look(self, keys: Sequence[Key]) -> Words:
        """Who holds keys; those that somebody holds are used."""
        if len(keys) <= FEW_BLOCKS:
            return np.array(self._look_few(keys, len(keys)), np.uint32)
        entries = self._table.find_many(keys)
        words = self._words_of(entries)
        self._recency.touch_many(entries[words != 0])
        return words

    def _words(self, keys: Sequence[Key]) -> Words:
        return self._words_of(self._table.find_many(keys))

    def _words_of(self, entries: Entries) -> Words:
        words: Words = self._columns.words[entries]
        words[entries < 0] = 0
        return words

    def peers(self, blocks: Sequence[Key], begin: int, holder: int, most: int) -> list[tuple[int, int, int]]:
        """Whose host tiers hold blocks from `begin` on, `holder`'s own aside: pieces (holder, first block, blocks) of
        as few peers as greed finds, at most `most`. What the store alone has is passed over."""
        if begin >= len(blocks):
            return []
        positions, held = self._runs.pairs(self._words(blocks[begin:]))
        lent = ((held & HolderTier.HOST.value) != 0) & (held >> TIER_BITS != holder)
        positions, holders = positions[lent], (held[lent] >> TIER_BITS).astype(np.int64)
        pieces: list[tuple[int, int, int]] = []
        at = 0
        while len(pieces) < most and len(positions):
            at = max(at, int(positions.min()))
            far = chain_lengths(positions - at, holders, self.ranks)
            best = int(far.argmax())
            pieces.append((best, begin + at, int(far[best])))
            at += int(far[best])
            ahead = positions >= at
            positions, holders = positions[ahead], holders[ahead]
        return pieces

    def holders(self, key: Key) -> dict[int, HolderTier]:
        """Who holds a key, and in which tiers."""
        entry = self._table.find(key)
        held = self._runs.holders(int(self._columns.view[entry])) if entry >= 0 else []
        return {each >> TIER_BITS: HolderTier(each & TIERS) for each in held}

    @property
    def entries(self) -> int:
        """Pairs of key and holder."""
        return self._entries

    @property
    def keys(self) -> int:
        """Keys that somebody holds."""
        return self._table.linked - len(self._dead)

    def held(self, holder: int) -> int:
        """Keys that one holds."""
        return self._counts.get(holder, 0)

    @property
    def nbytes(self) -> int:
        """Memory that the index takes, bytes: columns as far as they were used, tables, runs and lists."""
        return self._keys_bytes + self._holders_bytes

    @property
    def _keys_bytes(self) -> int:
        return _ENTRY_BYTES * self._fresh + self._table.places_bytes + 4 * len(self._dead)

    @property
    def _holders_bytes(self) -> int:
        return self._runs.nbytes + self._lists_bytes

    # --- entries -------------------------------------------------------------------------------------------------

    def _entry(self, holder: int, tier: HolderTier) -> int:
        if not 0 <= holder < MOST_HOLDERS:
            raise ValueError(f"holder {holder} must be in [0, {MOST_HOLDERS})")
        bits = int(tier)
        if not 0 < bits <= TIERS:
            raise ValueError(f"tier {tier} must name a rank's own tiers")
        if holder >= self.ranks:
            self.ranks = holder + 1
        return holder << TIER_BITS | bits

    def _new(self, key: Key) -> int:
        """A number for a new key: a dead entry's, a fresh one, or that of the longest unused entry."""
        entry = self._reusable()
        if entry is None:
            bytes_after = self._keys_bytes + _ENTRY_BYTES + self._table.growth_bytes
            if self._fresh < self._most and bytes_after <= self._keys_budget:
                entry = self._fresh
                self._columns.clear(entry)
                self._fresh += 1
            else:
                self._forget(1)
                entry = self._reusable()
                assert entry is not None
        self._table.link(key, entry)
        return entry

    def _reusable(self) -> int | None:
        """A dead entry, whose old key leaves the table now."""
        columns = self._columns
        while self._dead:
            entry = self._dead.pop()
            columns.buried[entry] = 0
            if columns.view[entry] == 0:
                self._table.unlink(entry)
                return entry
        return None

    def _bury(self, entries: Entries) -> None:
        """Nobody holds them. Of an entry that came back to life the number may be in the list already."""
        new = entries[self._columns.buried_column[entries] == 0]
        self._columns.buried_column[new] = 1
        self._dead.frombytes(new.astype(np.uint32).tobytes())

    def _add(self, entry: int, holder: int, bits: int) -> None:
        view = self._columns.view
        word = view[entry]
        try:
            changed, new = self._runs.add(word, bits)
        except ArenaFull:
            self._make_room(entry)
            try:
                changed, new = self._runs.add(view[entry], bits)
            except ArenaFull:  # this entry alone fills the memory: the holder is not remembered, which costs hits
                return
        if changed != word:
            view[entry] = changed
        if new:
            self._held_more(holder, (entry,))
            if self._holders_bytes + CHUNK_BYTES > self._holders_budget:
                self._make_room(entry)

    def _remove(self, entry: int, holder: int, bits: int) -> None:
        view = self._columns.view
        word = view[entry]
        changed, left = self._runs.remove(word, bits)
        if changed == word and not left:
            return
        view[entry] = changed
        if left:
            self._lost(holder, 1)
            if changed == 0:
                self._bury_one(entry)

    def _bury_one(self, entry: int) -> None:
        if not self._columns.buried[entry]:
            self._columns.buried[entry] = 1
            self._dead.append(entry)

    def _forget(self, count: int, keep: int = -1) -> int:
        """The longest unused entries leave, with all their holders; how many did."""
        view = self._columns.view
        for done in range(count):
            entry = self._recency.oldest(view.__getitem__, self._alive)
            if entry is None:
                return done
            if entry == keep:
                continue
            word = view[entry]
            for held in self._runs.holders(word):
                self._lost(held >> TIER_BITS, 1)
            self._runs.free(word)
            view[entry] = 0
            self._bury_one(entry)
            self.forgotten += 1
        return count

    def _alive(self) -> Entries:
        entries: Entries = self._columns.words[: self._fresh].nonzero()[0]
        return entries

    # --- holders' lists --------------------------------------------------------------------------------------------

    def _lost(self, holder: int, entries: int) -> None:
        """It holds so many entries less."""
        if entries == 0:
            return
        self._entries -= entries
        count = self._counts[holder] - entries
        if count == 0:
            del self._counts[holder]
            self._lists_bytes -= self._held.pop(holder).nbytes
            return
        self._counts[holder] = count
        if 2 * self._held[holder].listed > 3 * count + 2 * _SLACK:
            self._list(holder, self._entries_of(holder))

    def _entries_of(self, holder: int) -> Entries:
        """Numbers of the entries that it holds, ascending. A list may name others too, left behind by removals."""
        listed = self._held[holder].entries()
        words = self._columns.words[listed]
        mine = (words >> TIER_BITS == holder) & (words != 0)
        several = (words >= RUN).nonzero()[0]
        if len(several):
            positions, held = self._runs.pairs(words[several])
            mine[several] = False
            mine[several[positions[held >> TIER_BITS == holder]]] = True
        entries: Entries = listed[mine]
        return entries

    def _list(self, holder: int, entries: Entries) -> None:
        self._lists_bytes += self._held[holder].replace(entries)

    def _make_room(self, keep: int) -> None:
        """Holders' memory is full: forget old entries, `keep` not, and move together what is left."""
        while self._holders_bytes + CHUNK_BYTES > self._holders_budget:
            if self._runs.fragmented:
                self._runs.compact(self._columns.words[: self._fresh])
                continue
            slack = [holder for holder, count in self._counts.items() if 8 * self._held[holder].listed > 9 * count]
            for holder in slack:
                self._list(holder, self._entries_of(holder))
            if self._holders_bytes + CHUNK_BYTES > self._holders_budget and self._forget(_EVICTED, keep) == 0:
                return


class _Columns:
    """Who holds an entry, and whether its number waits to be given out again."""

    BYTES: Final = 5

    def __init__(self, most: int) -> None:
        self.words: Words = np.empty(most, np.uint32)
        self.view = self.words.data
        self.buried_column: npt.NDArray[np.uint8] = np.empty(most, np.uint8)
        self.buried = self.buried_column.data

    def clear(self, entry: int) -> None:
        self.view[entry] = 0
        self.buried[entry] = 0

    def clear_many(self, begin: int, end: int) -> None:
        self.words[begin:end] = 0
        self.buried_column[begin:end] = 0


_ENTRY_BYTES: Final = KeyTable.BYTES + Recency.BYTES + _Columns.BYTES


def _check(keys: Sequence[Key]) -> None:
    if set(map(len, keys)) - {KEY_BYTES}:
        raise ValueError(f"keys have {sorted(set(map(len, keys)))} bytes; each must have {KEY_BYTES}")
