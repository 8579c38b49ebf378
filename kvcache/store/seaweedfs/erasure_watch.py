"""Erasures that other machines ordered, carried out on what reached the index after them.

Whoever orders an erasure takes the rows out that the index has then. Another machine may at that moment be writing an
entry that it had accepted before; its row comes later. So every sweep looks at the erasures that are new to it, and at
the headers of the rows that they might cover.
"""

from __future__ import annotations

import time

from headrace.kvcache.index.base import Index, IndexRow
from headrace.kvcache.store.base import WallClock
from headrace.kvcache.store.seaweedfs.eraser import OPERATOR_S, Eraser
from headrace.kvcache.store.seaweedfs.erasures import Erasure, covered
from headrace.kvcache.store.seaweedfs.reader import RecordReader
from headrace.kvcache.store.seaweedfs.scan import VolumeScan

_RECENT_NS = 3_600 * 10**9
"""Older erasures are of no concern: no machine takes that long to write what it accepted."""


class ErasureWatch:
    """For one thread."""

    def __init__(self, scan: VolumeScan, index: Index, eraser: Eraser, reader: RecordReader, wall: WallClock) -> None:
        self._scan = scan
        self._index = index
        self._eraser = eraser
        self._reader = reader
        self._wall = wall
        self._seen: set[Erasure] = set()

    def look(self) -> int:
        """Carry out what is new; returns how many rows went. StoreError, IndexUnavailable: try again later."""
        oldest = int(self._wall() * 1e9) - _RECENT_NS
        new = [each for each in self._scan.erasures() if each.until > oldest and each not in self._seen]
        gone = 0
        if new:
            for group in self._index.groups(time.monotonic() + OPERATOR_S):
                for row in self._index.rows_of(group, time.monotonic() + OPERATOR_S):
                    if any(each.may_cover(row.tenant_tag, group) for each in new) and self._is_covered(row, new):
                        self._eraser.forget(row)
                        gone += 1
        self._seen = {each for each in self._seen if each.until > oldest} | set(new)
        return gone

    def _is_covered(self, row: IndexRow, erasures: list[Erasure]) -> bool:
        header = self._reader.header(row, time.monotonic() + OPERATOR_S)
        return header is not None and covered(erasures, header.info, header.sequence)
