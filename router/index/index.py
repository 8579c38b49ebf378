"""The index of all ranks' own tiers, compact: what the prefill balancer asks once per request.

Keys have numbers (entries.py); by them the index keeps who holds a key (runs.py). Each holder has the list of its
entries (holdings.py).

The byte budget is divided: three fifths for keys, two for holders. Each part forgets the longest unused entries when it
is full; columns are reserved at once and take memory as they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from headrace.kvcache.keys import KEY_BYTES, Key
from headrace.router.index.base import NOTHING_STORED, HolderTier, PrefixMatch, StorePrefix
from headrace.router.index.bulk import MANY, joined, left
from headrace.router.index.chains import chain_lengths
from headrace.router.index.entries import KeyEntries
from headrace.router.index.holdings import Holdings
from headrace.router.index.match import FEW_BLOCKS, many_holders, match_few, match_many, words_of
from headrace.router.index.runs import CHUNK_BYTES, MOST_HOLDERS, RUN, TIER_BITS, TIERS, ArenaFull, HolderRuns, Words
from headrace.router.index.table import halves
from headrace.router.native.build import NativeRouter
from headrace.router.native.match import NativeMatch

LEAST_BUDGET: Final = 1 << 18
_KEYS_SHARE: Final = 0.6
_EVICTED: Final = 32
"""Entries forgotten at once when holders' memory is full."""
_KEPT_EMPTY: Final = 1024
"""Dead entries that an empty index may keep."""


class BlockIndex:
    """PrefixIndex (base.py)."""

    def __init__(self, budget_bytes: int, native: NativeRouter | None = None) -> None:
        """`native`: matches prompts; None: Python does. Raises ValueError for a budget below 256 KiB."""
        if budget_bytes < LEAST_BUDGET:
            raise ValueError(f"budget_bytes {budget_bytes} must be at least {LEAST_BUDGET}")
        self._keys_budget = int(budget_bytes * _KEYS_SHARE)
        self._holders_budget = budget_bytes - self._keys_budget
        self.ranks = 0
        """Entries of a match's columns: one more than the highest rank number seen; callers may raise it."""
        self.forgotten = 0
        """Entries that left for want of memory."""
        self._library = native
        self._start()

    def _start(self) -> None:
        """All memory at its least."""
        self._entries = KeyEntries(self._keys_budget)
        self._runs = HolderRuns(self._holders_budget)
        self._holdings = Holdings(self._entries, self._runs)
        self._native = None if self._library is None else NativeMatch(self._library)

    def _give_back(self) -> None:
        """Nobody holds anything: let memory go, unless it is next to nothing."""
        if self._entries.fresh > _KEPT_EMPTY:
            self._start()

    # --- what changes --------------------------------------------------------------------------------------------

    def stored(self, holder: int, tier: HolderTier, keys: Sequence[Key]) -> None:
        """See PrefixIndex. Raises ValueError for keys that are not 32 bytes and holders outside 14 bits."""
        bits = self._bits(holder, tier)
        _check(keys)
        if MANY <= len(keys) < self._entries.most // 4 and len(set(keys)) == len(keys):
            self._stored_many(holder, bits, keys)
            return
        find, touch = self._entries.table.find, self._entries.recency.touch
        tick = self._entries.recency.begin(len(keys))
        for key in keys:
            entry = find(key)
            if entry < 0:
                entry = self._entries.new(key, self._forget)
            touch(entry, tick)
            tick -= 1
            self._add(entry, holder, bits)

    def _stored_many(self, holder: int, bits: int, keys: Sequence[Key]) -> None:
        """Different keys, far fewer than the index can hold."""
        words, table, recency = self._entries.words, self._entries.table, self._entries.recency
        low, high = halves(keys)
        entries = table.find_halves(low, high)
        known = entries[entries >= 0]
        if len(known):
            # First of all: among them may be dead ones, whose numbers are given away below, and nothing that is used
            # now may be forgotten for the new ones.
            recency.touch_many(known)
            words[known], how = joined(words[known], bits)
            self._holdings.gained(holder, known[how == 1].tolist())
            for entry in known[how == 2].tolist():
                self._add(entry, holder, bits)
        new = (entries < 0).nonzero()[0]
        if len(new):
            numbers = self._entries.new_many(len(new), self._forget)
            table.link_many(low[new], high[new], numbers)
            words[numbers] = bits
            entries[new] = numbers
            self._holdings.gained(holder, numbers.tolist())
        recency.touch_many(entries)
        if self._holders_bytes + CHUNK_BYTES > self._holders_budget:
            self._make_room(-1)

    def removed(self, holder: int, tier: HolderTier, keys: Sequence[Key]) -> None:
        """See PrefixIndex."""
        bits = self._bits(holder, tier)
        _check(keys)
        if len(keys) >= MANY and len(set(keys)) == len(keys):
            self._removed_many(holder, bits, keys)
        else:
            for key in keys:
                entry = self._entries.table.find(key)
                if entry >= 0:
                    self._remove(entry, holder, bits)
        if self._holdings.pairs == 0:
            self._give_back()

    def _removed_many(self, holder: int, bits: int, keys: Sequence[Key]) -> None:
        """Different keys."""
        entries = self._entries.table.find_many(keys)
        entries = entries[entries >= 0]
        words, how = left(self._entries.words[entries], bits)
        self._entries.words[entries] = words
        gone = entries[how == 1]
        self._entries.bury_many(gone)
        self._holdings.lost(holder, len(gone))
        for entry in entries[how == 2].tolist():
            self._remove(entry, holder, bits)

    def clear(self, holder: int, tier: HolderTier = HolderTier.DEVICE | HolderTier.HOST) -> int:
        """See PrefixIndex."""
        bits = self._bits(holder, tier)
        before = self._holdings.count(holder)
        if not before:
            return 0
        entries = self._holdings.entries(holder)
        words = self._entries.words[entries]
        single = words < RUN
        mine, left = entries[single], words[single] & ~np.uint32(bits & TIERS)
        left[(left & TIERS) == 0] = 0
        self._entries.words[mine] = left
        gone = mine[left == 0]
        self._entries.bury_many(gone)
        self._holdings.lost(holder, len(gone))
        for entry in entries[~single].tolist():
            self._remove(entry, holder, bits)
        removed = before - self._holdings.count(holder)
        if self._holdings.pairs == 0:
            self._give_back()
        elif self._holdings.count(holder):
            self._holdings.tidy(holder)
        return removed

    # --- what is asked -------------------------------------------------------------------------------------------

    def match(
        self, blocks: Sequence[Key], snapshots: Sequence[Key] | None, limit: int, store: StorePrefix = NOTHING_STORED
    ) -> PrefixMatch:
        """See PrefixIndex."""
        count = max(0, min(len(blocks), limit))
        if self._native is not None:
            return self._native.match(self._entries, self._runs, blocks, snapshots, count, store, self.ranks)
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
        find, view, touch = self._entries.table.find, self._entries.view, self._entries.recency.touch
        tick = self._entries.recency.begin(len(keys))
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
        entries = self._entries.table.find_many(keys)
        words = self._entries.words_of(entries)
        self._entries.recency.touch_many(entries[words != 0])
        return words

    def peers(self, blocks: Sequence[Key], begin: int, holder: int, most: int) -> list[tuple[int, int, int]]:
        """Whose host tiers hold blocks from `begin` on, `holder`'s own aside: pieces (holder, first block, blocks) of
        as few peers as greed finds, at most `most`. What the store alone has is passed over."""
        if begin >= len(blocks):
            return []
        words = self._entries.words_of(self._entries.table.find_many(blocks[begin:]))
        positions, held = self._runs.pairs(words)
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
        entry = self._entries.table.find(key)
        held = self._runs.holders(int(self._entries.view[entry])) if entry >= 0 else []
        return {each >> TIER_BITS: HolderTier(each & TIERS) for each in held}

    @property
    def entries(self) -> int:
        """Pairs of key and holder."""
        return self._holdings.pairs

    @property
    def keys(self) -> int:
        """Keys that somebody holds."""
        return self._entries.keys

    def held(self, holder: int) -> int:
        """Keys that one holds."""
        return self._holdings.count(holder)

    @property
    def nbytes(self) -> int:
        """Memory that the index takes, bytes: columns as far as they were used, tables, runs and lists."""
        return self._entries.nbytes + self._holders_bytes

    @property
    def _holders_bytes(self) -> int:
        return self._runs.nbytes + self._holdings.nbytes

    # --- one entry -----------------------------------------------------------------------------------------------

    def _bits(self, holder: int, tier: HolderTier) -> int:
        """holder << 2 | tiers."""
        if not 0 <= holder < MOST_HOLDERS:
            raise ValueError(f"holder {holder} must be in [0, {MOST_HOLDERS})")
        bits = int(tier)
        if not 0 < bits <= TIERS:
            raise ValueError(f"tier {tier} must name a rank's own tiers")
        if holder >= self.ranks:
            self.ranks = holder + 1
        return holder << TIER_BITS | bits

    def _add(self, entry: int, holder: int, bits: int) -> None:
        view = self._entries.view
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
            self._holdings.gained(holder, (entry,))
            if self._holders_bytes + CHUNK_BYTES > self._holders_budget:
                self._make_room(entry)

    def _remove(self, entry: int, holder: int, bits: int) -> None:
        view = self._entries.view
        word = view[entry]
        changed, left = self._runs.remove(word, bits)
        if changed == word and not left:
            return
        view[entry] = changed
        if left:
            self._holdings.lost(holder, 1)
            if changed == 0:
                self._entries.bury(entry)

    # --- want of memory ------------------------------------------------------------------------------------------

    def _forget(self, count: int, keep: int = -1) -> int:
        """The longest unused entries leave, with all their holders; how many did."""
        view = self._entries.view
        for done in range(count):
            entry = self._entries.recency.oldest(view.__getitem__, self._entries.alive)
            if entry is None:
                return done
            if entry == keep:
                continue
            word = view[entry]
            for held in self._runs.holders(word):
                self._holdings.lost(held >> TIER_BITS, 1)
            self._runs.free(word)
            view[entry] = 0
            self._entries.bury(entry)
            self.forgotten += 1
        return count

    def _make_room(self, keep: int) -> None:
        """Holders' memory is full: forget old entries, `keep` not, and move together what is left."""
        while self._holders_bytes + CHUNK_BYTES > self._holders_budget:
            if self._runs.fragmented:
                self._runs.compact(self._entries.words[: self._entries.fresh])
                continue
            self._holdings.tidy_loose()
            if self._holders_bytes + CHUNK_BYTES > self._holders_budget and self._forget(_EVICTED, keep) == 0:
                return


def _check(keys: Sequence[Key]) -> None:
    if set(map(len, keys)) - {KEY_BYTES}:
        raise ValueError(f"keys have {sorted(set(map(len, keys)))} bytes; each must have {KEY_BYTES}")
