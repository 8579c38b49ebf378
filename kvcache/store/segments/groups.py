"""What the writer hands on: runs of records to the threads that write, groups of them to the commit thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kvcache.store.segments.buffers import Buffer
from headrace.kvcache.store.segments.open_segment import OpenSegment
from headrace.kvcache.store.segments.pending import Pending


class Group:
    """What is made durable together. The writer adds to it and hands it over while its writes are still under way."""

    def __init__(self) -> None:
        self.retired: list[OpenSegment] = []
        """To be sealed after the sync."""
        self.size = 0
        self.started = 0.0
        self._changed = threading.Condition()
        self._writing = 0
        self._written: dict[OpenSegment, list[Pending]] = {}

    def begin(self) -> None:
        """One more write is under way."""
        with self._changed:
            self._writing += 1

    def end(self, segment: OpenSegment, written: Sequence[Pending]) -> None:
        """It ended; `written` is empty if it failed."""
        with self._changed:
            if written:
                self._written.setdefault(segment, []).extend(written)
            self._writing -= 1
            self._changed.notify_all()

    def written(self) -> dict[OpenSegment, list[Pending]]:
        """Waits for the writes under way. Entries in order of their places."""
        with self._changed:
            while self._writing:
                self._changed.wait()
            for pendings in self._written.values():
                pendings.sort(key=offset_of)
            return self._written


@dataclass(frozen=True, slots=True)
class Rotation:
    """A moment at which a writer began new segments."""

    paths: tuple[str, ...]
    """The old ones, which are sealed soon (OwnSegments)."""
    number: int
    """The highest number of a segment before that moment."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Records that lie one behind the other, to be written by one pwritev."""

    group: Group
    segment: OpenSegment
    pendings: Sequence[Pending]
    offset: int
    buffers: Sequence[Buffer]
    """The whole records, a checksum of each header missing."""


def offset_of(pending: Pending) -> int:
    """Where a placed record lies."""
    if pending.header is None:
        raise AssertionError("a placed record has its header")
    return pending.header.offset
