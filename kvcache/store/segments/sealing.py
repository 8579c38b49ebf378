"""The seal thread: footer, sidecar and last sync of full segments, while the commit thread goes on with later groups.

Sealing takes several syncs, 40 to 90 ms beside a busy disk (measured): in the commit thread they would hold up all that
waits to become durable. Nothing of a segment depends on its seal: without one it is found by its headers.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from headrace.kvcache.store.segments.open_segment import OpenSegment
from headrace.kvcache.store.segments.own_segments import OwnSegments
from headrace.kvcache.store.segments.table import SegmentTable

_log = logging.getLogger(__name__)
_WAITING = 4
"""Segments that wait for their seal; more make the commit thread wait (L12)."""


class Sealer:
    """Ends with `close`, after what was put before."""

    def __init__(self, table: SegmentTable, own: OwnSegments, check_ours: Callable[[], None]) -> None:
        """`check_ours`: OSError if another process took this writer's segments over, or if that cannot be told."""
        self._table = table
        self._own = own
        self._check_ours = check_ours
        self.unsealed = 0
        """Segments that could not be sealed."""
        self._segments: queue.Queue[OpenSegment | None] = queue.Queue(maxsize=_WAITING)
        self._thread = threading.Thread(target=self._run, name="store-seal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, segment: OpenSegment) -> None:
        """All that was written to it is committed or failed."""
        self._segments.put(segment)

    def close(self) -> None:
        """Returns when all is sealed."""
        self._segments.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (segment := self._segments.get()) is not None:
            try:
                self._seal(segment)
            except Exception:  # noqa: BLE001 - the boundary: one bad segment must not end all sealing (L13)
                _log.exception("%s stays without a sidecar", segment.path)
                self.unsealed += 1
            finally:
                self._own.closed(segment.path)

    def _seal(self, segment: OpenSegment) -> None:
        try:
            try:
                self._check_ours()
            except OSError:
                segment.forsake()
                raise
            size = segment.seal()
        except OSError as error:
            _log.warning("%s stays without a sidecar: %s", segment.path, error)
            self.unsealed += 1
        else:
            if size:
                self._table.sealed(segment.path, size)
