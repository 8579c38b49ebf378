"""The drops that operators order: a bucket, a namespace, a tenant."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from headrace.kvcache.cache_events import BucketDropped, EventSink, NamespaceDropped
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.index.base import Index, IndexRow, IndexUnavailable
from headrace.kvcache.store.base import DropCount, StoreError
from headrace.kvcache.store.files import FileLayer
from headrace.kvcache.store.segments.erasures import Erasure, Erasures
from headrace.kvcache.store.segments.groups import Rotation
from headrace.kvcache.store.segments.names import Bucket
from headrace.kvcache.store.segments.own_segments import OwnSegments
from headrace.kvcache.store.segments.pending import Pending
from headrace.kvcache.store.segments.recovery import FoundSegment, find_segments
from headrace.kvcache.store.segments.unlinking import Unlinking
from headrace.kvcache.store.segments.writer import SegmentWriter

_SEAL_S = 30.0
_INDEX_S = 30.0
_BATCH = 2048


class Epochs:
    """Counts the erasures that this process made or learned of, so that what it accepted before one, or read to append
    it again, is never stored after it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self._namespaces: dict[bytes, int] = {}
        self._tenants: dict[bytes, int] = {}

    @property
    def now(self) -> int:
        return self._now

    def advance(self, *, namespace: bytes | None = None, tenant_tag: bytes | None = None) -> None:
        """Everything accepted before now, of that namespace or tenant, is erased."""
        with self._lock:
            self._now += 1
            if namespace is not None:
                self._namespaces[namespace] = self._now
            if tenant_tag is not None:
                self._tenants[tenant_tag] = self._now

    def covers(self, pending: Pending) -> bool:
        """Whether an erasure came after the entry was accepted."""
        if pending.epoch == self._now:
            return False
        info = pending.info
        with self._lock:
            return pending.epoch < max(self._namespaces.get(info.namespace, 0), self._tenants.get(info.tenant_tag, 0))


class Erasing:
    """Operators' calls, each of its own thread. StoreError: some of it is left; the call can be repeated."""

    def __init__(
        self,
        files: FileLayer,
        index: Index,
        unlinking: Unlinking,
        erasures: Erasures,
        epochs: Epochs,
        writer: SegmentWriter,
        own: OwnSegments,
        own_writer: str,
        commit_barrier: Callable[[], None],
        removed: Callable[[Sequence[IndexRow]], DropCount],
        events: EventSink,
        passing: threading.Lock,
    ) -> None:
        """`commit_barrier`: returns when every commit that had not seen the new epoch has told the index. `removed`:
        take rows, which the index has no more, out of the table, tell it, and count them. `passing`: held by a pass of
        the sweeper, which would take away uncounted what an erasure is about to count."""
        self._files = files
        self._index = index
        self._unlinking = unlinking
        self._erasures = erasures
        self._epochs = epochs
        self._writer = writer
        self._own = own
        self._own_writer = own_writer
        self._commit_barrier = commit_barrier
        self._removed = removed
        self._events = events
        self._passing = passing

    def drop_bucket(self, name: str) -> DropCount:
        """Not an erasure: an index rebuilt later may find what another living process had open then."""
        bucket = Bucket.parse(name)
        if bucket is None:
            raise StoreError(f"{name!r} is no bucket; they are named <namespace hex>/<class>/<expiry second>")
        with _said(), self._passing:
            self._retire(self._writer.rotate(namespace=bucket.namespace))
            rows = self._drop_segments(find_segments(self._files, bucket))
        self._events(BucketDropped(name))
        return _count(rows)

    def drop_namespace(self, namespace: bytes) -> DropCount:
        with _said(), self._passing:
            rotation = self._writer.rotate(namespace, then=lambda: self._epochs.advance(namespace=namespace))
            self._record(rotation, None, namespace)
            self._commit_barrier()
            self._retire(rotation)
            rows = self._drop_segments(
                found for found in find_segments(self._files) if self._erasures.covers_all(found.name.path)
            )
            for group in self._index.groups(self._deadline()):
                if self._erasures.covers_all(group):
                    rows += self._index.drop_group(group, self._deadline())
        self._events(NamespaceDropped(namespace))
        return _count(rows)

    def drop_tenant(self, tenant_tag: bytes) -> DropCount:
        blocks = snapshots = 0
        with _said(), self._passing:
            rotation = self._writer.rotate(then=lambda: self._epochs.advance(tenant_tag=tenant_tag))
            self._record(rotation, tenant_tag)
            self._commit_barrier()
            theirs = [row for row in self._index.scan(self._deadline()) if row.tenant_tag == tenant_tag]
            theirs = [row for row in theirs if self._erasures.covers(row.group, tenant_tag)]
            for start in range(0, len(theirs), _BATCH):
                rows = theirs[start : start + _BATCH]
                self._index.remove_many(rows, self._deadline())
                count = self._removed(rows)
                blocks, snapshots = blocks + count.blocks, snapshots + count.snapshots
        return DropCount(blocks, snapshots)

    def _record(self, rotation: Rotation, tenant_tag: bytes | None, only: bytes | None = None) -> None:
        """Write the erasure into the logs, of one namespace or of all.

        Twice where another process made a segment meanwhile: that may hold copies of older records, told of before the
        first entry could be seen. Whatever is made after the second look is written by who has seen the first entry
        (writer.py), and knows that what it accepted earlier is erased."""
        recorded: dict[bytes, dict[str, int]] = {}
        for _ in range(2):
            for namespace, fences in self._fences(rotation).items():
                known = recorded.get(namespace, {})
                if only in (None, namespace) and any(fences[writer] > known.get(writer, 0) for writer in fences):
                    self._erasures.erase(namespace, Erasure(tenant_tag, fences))
                    recorded[namespace] = fences

    def _fences(self, rotation: Rotation) -> dict[bytes, dict[str, int]]:
        """By namespace: everything that exists now; of the own writer, everything before the rotation."""
        fences: dict[bytes, dict[str, int]] = {}
        for found in find_segments(self._files):
            name = found.name
            numbers = fences.setdefault(name.bucket.namespace, {})
            if name.writer != self._own_writer:
                numbers[name.writer] = max(name.number, numbers.get(name.writer, 0))
            elif rotation.number:
                numbers[name.writer] = rotation.number
        return {namespace: numbers for namespace, numbers in fences.items() if numbers}

    def _retire(self, rotation: Rotation) -> None:
        if not self._own.wait_closed(rotation.paths, _SEAL_S):
            raise StoreError(f"segments were not sealed within {_SEAL_S:.0f} s; the disk is slow or broken, try again")

    def _drop_segments(self, segments: Iterable[FoundSegment]) -> list[IndexRow]:
        """Sealed ones go; of one that a living writer has open only the rows do."""
        rows: list[IndexRow] = []
        for found in list(segments):
            if found.sidecar:
                rows += self._unlinking.drop(found.name.path)
            else:
                rows += self._unlinking.drop_rows(found.name.path)
        return rows

    @staticmethod
    def _deadline() -> float:
        return time.monotonic() + _INDEX_S


@contextmanager
def _said() -> Iterator[None]:
    """Errors as an operator can act on them."""
    try:
        yield
    except IndexUnavailable as error:
        raise StoreError(f"the index does not answer ({error}); repeat the call when it is back") from error
    except OSError as error:
        raise StoreError(f"the store's files cannot be changed ({error}); repeat the call when they can") from error


def _count(rows: Sequence[IndexRow]) -> DropCount:
    blocks = sum(row.kind is EntryKind.BLOCK for row in rows)
    return DropCount(blocks, len(rows) - blocks)
