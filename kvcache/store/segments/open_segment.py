"""A segment that this process is writing: append, sync, seal."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence

from headrace.kvcache.store.files import FileLayer, StoreFile
from headrace.kvcache.store.segments.buffers import page_aligned
from headrace.kvcache.store.segments.names import SegmentName
from headrace.kvcache.store.segments.record import ALIGN, Header, segment_id
from headrace.kvcache.store.segments.sidecar import Footer, encode_sidecar, write_footer

_PART = ".part"
_READ_BYTES = 1 << 18


def write_all(file: StoreFile, buffers: Sequence[memoryview], offset: int) -> None:
    """pwritev until everything is there. OSError when the file takes nothing more; the place is then spoiled."""
    rest = list(buffers)
    while rest:
        count = file.pwritev(rest, offset)
        if count <= 0 or (count % ALIGN and sum(map(len, rest)) != count):
            raise OSError(5, f"short write of {count} bytes at offset {offset}")
        offset += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]


def read_whole(file: StoreFile) -> memoryview:
    """Everything in a small file without O_DIRECT. Read to its end, since a mount may remember an old size."""
    data = bytearray()
    part = memoryview(bytearray(_READ_BYTES))
    while (count := file.preadv([part], len(data))) > 0:
        data += part[:count]
    return memoryview(data)


def write_sidecar(files: FileLayer, name: SegmentName, data: bytes) -> None:
    """Put the sidecar in its place as a whole: it is there and complete, or not there."""
    part = name.sidecar + _PART
    if part.rpartition("/")[2] in files.list(name.bucket.directory):
        files.unlink(part)
    file = files.create(part, direct=False)
    try:
        write_all(file, [memoryview(data)], 0)
        file.datasync()
    finally:
        file.close()
    files.rename(part, name.sidecar)
    files.sync_directory(name.bucket.directory)


class OpenSegment:
    """One writer appends, one thread syncs and seals; `assign` and the writes are the writer's, the rest the other's.

    A write or sync that fails makes the segment `broken`: nothing more is appended, since a failed write may still land
    (files.py), and what was durable before stays.
    """

    def __init__(
        self, files: FileLayer, name: SegmentName, size: int, *, direct: bool, before: SegmentName | None = None
    ) -> None:
        """Make and preallocate the file. OSError if the disk is full or broken; nothing is left behind then.

        `before`: a segment of this bucket that this process opened earlier."""
        self.name = name
        self.path = name.path
        self.identity = segment_id(name.path)
        self.broken = False
        self._sync_failed = False
        self._files = files
        self._size = size
        self._assigned = 0
        self._durable: list[Header] = []
        self._before = before
        self._named = False
        self._file = files.create(self.path, direct=direct)
        try:
            self._file.truncate(size)
        except OSError:
            self._file.close()
            files.unlink(self.path)
            raise

    @property
    def descriptor(self) -> int:
        """Of the file, over a layer with descriptors. Whoever writes there sets `broken` when that fails."""
        return self._file.descriptor

    def fits(self, size: int) -> bool:
        """Whether a record of that many bytes, and a footer, still fit. An empty segment takes any record."""
        return not self.broken and (self._assigned == 0 or self._assigned + size + ALIGN <= self._size)

    def assign(self, size: int) -> int:
        """The offset of the next record."""
        offset = self._assigned
        self._assigned += size
        return offset

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Whole records, one behind the other. OSError: broken."""
        try:
            write_all(self._file, buffers, offset)
        except OSError:
            self.broken = True
            raise

    def sync(self, headers: Sequence[Header]) -> None:
        """Make these records durable. OSError: broken, and none of them can be counted on; nor can what was written
        while the sync failed, since Linux gives up the pages of a failed sync and calls the next one a success."""
        if self._sync_failed:
            raise OSError(errno.EIO, "an earlier sync of this segment failed")
        try:
            self._make_name_durable()
            self._file.datasync()
        except OSError:
            self.broken = self._sync_failed = True
            raise
        self._durable.extend(headers)

    def _make_name_durable(self) -> None:
        """Before anything in the file is promised: a sync of a file does not keep its name. Here rather than when the
        file is made, since four directories cost 20 ms, in which the writer goes on.

        All directories, or only the last if `before` still lies in it: names are never used twice, so that directory
        is the one that was made durable for it."""
        if self._named:
            return
        directory = self.name.bucket.directory
        made_before = self._before is not None and self._before.path.rpartition("/")[2] in self._files.list(directory)
        self._files.sync_directory(directory)
        while directory and not made_before:
            directory = directory.rpartition("/")[0]
            self._files.sync_directory(directory)
        self._named = True

    def seal(self) -> int:
        """Footer, cut to size, sidecar, close; returns the bytes of the file, 0 if nothing in it was ever durable and
        it was unlinked. After an OSError the segment is as good as one whose writer died: found by its headers."""
        try:
            if not self._durable:
                # It may be gone already, with its whole bucket.
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(self.path)
                return 0
            return self._seal()
        finally:
            self._file.close()

    def forsake(self) -> None:
        """Close and change nothing: it is another process's now, or it cannot be told whose."""
        self._file.close()

    def _seal(self) -> int:
        headers = sorted(self._durable, key=lambda header: header.offset)
        end = headers[-1].end if self.broken else self._assigned
        sidecar = encode_sidecar(headers, self.identity, end)
        if self.broken:
            # Behind a failed write nothing is written in this file any more: it goes without a footer.
            self._file.truncate(end)
        else:
            page = memoryview(page_aligned(ALIGN))
            write_footer(Footer(len(headers), end, self.identity, sidecar[-16:]), page)
            write_all(self._file, [page], end)
            end += ALIGN
            self._file.truncate(end)
        self._file.datasync()
        write_sidecar(self._files, self.name, sidecar)
        return end
