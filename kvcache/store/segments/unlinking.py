"""How segments go: out of every reader's sight first, off the disk when nobody reads them (L4).

A segment that goes is renamed `.gone`, loses its index rows, and is unlinked once its readers are gone or 30 s have
passed. The name goes first: a crash in between leaves rows that lead to a verified miss, or a `.gone` file that any
sweeper unlinks; never a segment that nobody counts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

from headrace.kvcache.index.base import Index, IndexRow
from headrace.kvcache.store.files import FileLayer
from headrace.kvcache.store.segments.handles import SegmentFiles
from headrace.kvcache.store.segments.names import GONE_SUFFIX, SIDECAR_SUFFIX, SUFFIX, SegmentName
from headrace.kvcache.store.segments.table import SegmentTable

_log = logging.getLogger(__name__)


class Unlinking:
    """Thread-safe."""

    def __init__(
        self, files: FileLayer, index: Index, handles: SegmentFiles, table: SegmentTable, index_timeout_s: float
    ) -> None:
        self._files = files
        self._index = index
        self._handles = handles
        self._table = table
        self._index_timeout_s = index_timeout_s

    def drop(self, path: str) -> Sequence[IndexRow]:
        """Let a segment go; returns the rows it had. Whoever calls has made sure that no living writer has it open.
        IndexUnavailable: the file is gone from sight, its rows lead to misses. OSError: nothing has changed, or, behind
        the rename, the same."""
        self._handles.condemn(path)
        try:
            self._files.rename(path, path.removesuffix(SUFFIX) + GONE_SUFFIX)
        except FileNotFoundError:
            pass
        except OSError:
            # It stays, so it must not be taken for one that goes: reap would unlink its sidecar.
            self._handles.gone(path)
            raise
        else:
            # Its rows must not go before its name does.
            self._files.sync_directory(path.rpartition("/")[0])
        rows = self._index.drop_group(path, time.monotonic() + self._index_timeout_s)
        self._table.remove(rows)
        return rows

    def drop_rows(self, path: str) -> Sequence[IndexRow]:
        """Only the rows of a segment, whose file a living writer has open; returns them."""
        rows = self._index.drop_group(path, time.monotonic() + self._index_timeout_s)
        self._table.remove(rows)
        return rows

    def reap(self) -> int:
        """Unlink what nobody reads any more; returns how many segments went. A file that cannot be unlinked now is
        tried again."""
        gone = 0
        for path in self._handles.reap():
            stem = path.removesuffix(SUFFIX)
            try:
                for name in (stem + GONE_SUFFIX, stem + SIDECAR_SUFFIX):
                    with contextlib.suppress(FileNotFoundError):
                        self._files.unlink(name)
            except OSError as error:
                _log.warning("%s cannot be unlinked yet: %s", path, error)
                continue
            self._handles.gone(path)
            self._table.forget(path)
            name_of = SegmentName.parse(path)
            if name_of is not None:
                self.remove_if_empty(name_of.bucket.directory)
            gone += 1
        return gone

    def remove_if_empty(self, directory: str) -> None:
        """rmdir; a directory with something in it, or that another process removed, stays as it is."""
        if not self._files.list(directory):
            with contextlib.suppress(OSError):
                self._files.rmdir(directory)
