"""Every live record of a store, as its segments tell: what scans list and a lost index is refilled with."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from headrace.kvcache.entries import Miss
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.store.base import ScannedEntry, WallClock
from headrace.kvcache.store.files import FileLayer, miss_of
from headrace.kvcache.store.retention.classes import NEVER, expired
from headrace.kvcache.store.segments.commit import row_of
from headrace.kvcache.store.segments.erasures import Erasures
from headrace.kvcache.store.segments.names import SegmentName
from headrace.kvcache.store.segments.record import Header
from headrace.kvcache.store.segments.recovery import find_segments, read_records

_log = logging.getLogger(__name__)


class Records:
    """Unexpired, not erased. A segment that cannot be read is left out, and said in the log; OSError where no segment
    can be read for the moment."""

    def __init__(self, files: FileLayer, erasures: Erasures, wall: WallClock, *, direct: bool) -> None:
        self._files = files
        self._erasures = erasures
        self._wall = wall
        self._direct = direct

    def rows(self) -> Iterator[IndexRow]:
        """As the index has them; older copies of an entry among them."""
        for header, name in self._live():
            yield row_of(header, name.path)

    def entries(self) -> Iterator[ScannedEntry]:
        """As operators see them."""
        for header, name in self._live():
            expires_at = float("inf") if header.expires_at == NEVER else float(header.expires_at)
            yield ScannedEntry(header.info, expires_at, name.bucket.name)

    def _live(self) -> Iterator[tuple[Header, SegmentName]]:
        now = self._wall()
        for found in find_segments(self._files):
            path = found.name.path
            if expired(found.name.bucket.end, now):
                continue
            try:
                self._erasures.refresh({path})
                headers = read_records(self._files, found, direct=self._direct)
            except FileNotFoundError:
                continue
            except OSError as error:
                if miss_of(error) is not Miss.SERVER:
                    # Not this file but the moment (a mount that is gone): better no answer than one without it.
                    raise
                _log.warning("%s cannot be read and is left out: %s", path, error)
                continue
            for header in headers:
                if not self._erasures.covers(path, header.info.tenant_tag):
                    yield header, found.name
