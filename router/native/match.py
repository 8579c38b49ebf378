"""One prompt against the index, by index.h: the answers of router/index/match.py."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np

from headrace.kvcache.keys import KEY_BYTES, Key
from headrace.router.index.base import PrefixMatch, StorePrefix
from headrace.router.index.entries import KeyEntries
from headrace.router.index.runs import HolderRuns
from headrace.router.native.build import NativeRouter
from headrace.router.native.structs import IndexColumns, Prompt, address

_COLUMNS: Final = 3
"""device, local, mixed."""


class NativeMatch:
    """For one index and one thread."""

    def __init__(self, native: NativeRouter) -> None:
        self._native = native
        self._columns = IndexColumns()
        self._prompt = Prompt()
        self._columns_at = ctypes.addressof(self._columns)
        self._prompt_at = ctypes.addressof(self._prompt)
        self._known: tuple[object, object, object] = (None, None, None)
        """Arrays that the columns point to; others take their places as the index grows."""

    def match(
        self,
        entries: KeyEntries,
        runs: HolderRuns,
        blocks: Sequence[Key],
        snapshots: Sequence[Key] | None,
        count: int,
        store: StorePrefix,
        ranks: int,
    ) -> PrefixMatch:
        """See PrefixIndex.match, of the first `count` blocks. Raises ValueError for keys that are not 32 bytes."""
        places, arena, known = entries.table.places, runs.arena, self._known
        if known[0] is not entries or known[1] is not places or known[2] is not arena:
            self._point(entries, runs)
        found = np.zeros((_COLUMNS, ranks), np.int32)
        prompt = self._prompt
        prompt.keys = _joined(blocks, count)
        prompt.count = count
        prompt.stored = min(store.blocks, count)
        prompt.tick = entries.recency.begin(count)
        prompt.ranks = ranks
        base = address(found)
        prompt.device = base
        prompt.local = base + 4 * ranks
        prompt.mixed = base + 8 * ranks
        self._native.match_blocks(self._columns_at, self._prompt_at)
        if snapshots is not None and prompt.longest:
            self._snapshots(entries, snapshots, store)
        device = found[0]
        return PrefixMatch(
            device,
            device if prompt.same else found[1],
            prompt.shared,
            found[2] if prompt.further else None,
        )

    def _snapshots(self, entries: KeyEntries, snapshots: Sequence[Key], store: StorePrefix) -> None:
        """What the blocks allow, as far as there are snapshots."""
        prompt = self._prompt
        count = prompt.count = prompt.longest
        lent = bytearray(count + 1)
        for end in store.snapshots:
            if end <= count:
                lent[end] = 1
        prompt.keys = _joined(snapshots, count)
        prompt.lent = bytes(lent)
        prompt.tick = entries.recency.begin(count)
        self._native.match_snapshots(self._columns_at, self._prompt_at)

    def _point(self, entries: KeyEntries, runs: HolderRuns) -> None:
        columns, table = self._columns, entries.table
        columns.places = address(table.places)
        columns.mask = len(table.places) - 1
        columns.low, columns.high = address(table.low), address(table.high)
        columns.words = address(entries.words)
        columns.ticks = address(entries.recency.ticks)
        columns.arena = address(runs.arena)
        self._known = entries, table.places, runs.arena


def _joined(keys: Sequence[Key], count: int) -> bytes:
    joined = b"".join(keys[:count])
    if len(joined) != KEY_BYTES * count:
        raise ValueError(f"{count} keys have {len(joined)} bytes together; each must have {KEY_BYTES}")
    return joined
