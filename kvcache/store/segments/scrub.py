"""A scrub: every record of every segment read and checked, and compared with the index.

A record is bad when an entry is lost by it. One that was refreshed, moved or written again since lies elsewhere, and
what has become of the old copy matters to nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.kvcache.entries import Miss
from headrace.kvcache.index.base import Index, IndexRow
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import VerifyReport
from headrace.kvcache.store.files import FileLayer, miss_of
from headrace.kvcache.store.segments.record import segment_id
from headrace.kvcache.store.segments.recovery import FoundSegment, find_segments, read_sidecar, scan_file

_INDEX_S = 10.0
_REPORT_EVERY = 256


class Scrub:
    """One pass over a store. Rows without a valid record are left in `dangling`, for the caller to remove."""

    def __init__(
        self,
        files: FileLayer,
        index: Index,
        *,
        direct: bool,
        skipped: Callable[[FoundSegment], bool],
        covered: Callable[[str, bytes], bool],
        progress: Callable[[int], None],
    ) -> None:
        """`skipped`: segments to leave out (expired). `covered`: whether a record of that segment and tenant was
        erased, so that the index rightly does not know it."""
        self._files = files
        self._index = index
        self._direct = direct
        self._skipped = skipped
        self._covered = covered
        self._progress = progress
        self._checked = 0
        self._bad: list[tuple[Key, Miss]] = []
        self._unknown = 0
        self.dangling: list[IndexRow] = []

    def run(self) -> VerifyReport:
        seen = set()
        # Asked before the files are listed: the rows of a segment that is made meanwhile are no orphans. Where a mount
        # may deny what is there, nothing tells an orphan.
        known = () if self._files.names_lag else self._index.groups(self._deadline())
        for found in find_segments(self._files):
            if not self._skipped(found):
                seen.add(found.name.path)
                self._segment(found)
        for group in known:
            if group not in seen:
                self.dangling += self._index.rows_of(group, self._deadline())
        self._progress(self._checked)
        return VerifyReport(self._checked, tuple(self._bad), self._unknown, len(self.dangling))

    def _segment(self, found: FoundSegment) -> None:
        path = found.name.path
        rows = {row.place: row for row in self._index.rows_of(path, self._deadline())}
        expected = {row.place: row.key for row in rows.values()}
        if found.sidecar:
            for header in read_sidecar(self._files, found.name) or ():
                expected[header.offset] = header.info.key
        good: dict[int, Key] = {}
        bad: dict[int, tuple[Key, Miss]] = {}
        try:
            file = self._files.open(path, direct=self._direct)
            try:
                for header, whole in scan_file(file, segment_id(path)):
                    self._count()
                    if self._covered(path, header.info.tenant_tag):
                        expected.pop(header.offset, None)
                    elif whole:
                        good[header.offset] = header.info.key
                    elif expected.get(header.offset) == header.info.key:
                        bad[header.offset] = header.info.key, Miss.DIGEST
                        del expected[header.offset]
            finally:
                file.close()
        except FileNotFoundError:
            # Unlinked since it was listed, with its rows.
            return
        except OSError as error:
            self._lost({place: (key, miss_of(error)) for place, key in expected.items()}, rows)
            return
        for place, key in expected.items():
            if good.get(place) != key:
                self._count()
                bad[place] = key, Miss.HEADER
        self._lost(bad, rows)
        self.dangling += [row for row in rows.values() if good.get(row.place) != row.key]
        self._compare(path, good, rows)

    def _lost(self, bad: dict[int, tuple[Key, Miss]], rows: dict[int, IndexRow]) -> None:
        """Keep those bad records that the index names, or whose key it knows nowhere else."""
        old = [place for place in bad if place not in rows]
        elsewhere = self._index.get_many([bad[place][0] for place in old], self._deadline()) if old else ()
        replaced = {place for place, row in zip(old, elsewhere, strict=True) if row is not None}
        self._bad += [found for place, found in bad.items() if place not in replaced]

    def _compare(self, path: str, good: dict[int, Key], rows: dict[int, IndexRow]) -> None:
        """Valid records that the index does not know at all; older copies of what lives elsewhere do not count."""
        alone = [key for place, key in good.items() if place not in rows]
        for row in self._index.get_many(alone, self._deadline()) if alone else ():
            if row is None:
                self._unknown += 1

    def _count(self) -> None:
        self._checked += 1
        if self._checked % _REPORT_EVERY == 0:
            self._progress(self._checked)

    @staticmethod
    def _deadline() -> float:
        return time.monotonic() + _INDEX_S
