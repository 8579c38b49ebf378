"""How much disk the files of a store take, as listed: what quotas count, whoever wrote them.

A sealed segment never changes its size, so it is asked once. One that is still written counts with its preallocated
size; one that waits for its last readers counts until it is unlinked.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kvcache.store.files import FileLayer
from headrace.kvcache.store.segments.names import GONE_SUFFIX, SIDECAR_SUFFIX, SUFFIX, SegmentName
from headrace.kvcache.store.segments.recovery import find_buckets


@dataclass(frozen=True, slots=True)
class FileUse:
    """One segment."""

    name: SegmentName
    nbytes: int
    """Of its file and sidecar."""
    sealed: bool


@dataclass(frozen=True)
class DiskUse:
    """All files of a store."""

    segments: tuple[FileUse, ...]
    """By bucket, then in the order in which their writer made them."""
    leaving_bytes: int
    """Of segments that are already out of sight."""

    @property
    def nbytes(self) -> int:
        return self.leaving_bytes + sum(segment.nbytes for segment in self.segments)


class DiskMeter:
    """Not thread-safe."""

    def __init__(self, files: FileLayer) -> None:
        self._files = files
        self._sealed: dict[str, int] = {}
        """Bytes of sealed segments and their sidecars, by path."""

    def measure(self) -> DiskUse:
        """List every bucket. OSError if the store cannot be read; what vanishes meanwhile is not counted."""
        segments: list[FileUse] = []
        leaving = 0
        sealed: dict[str, int] = {}
        for bucket in find_buckets(self._files):
            names = set(self._files.list(bucket.directory))
            found = []
            for file in names:
                stem, dot, suffix = file.rpartition(".")
                path = f"{bucket.directory}/{stem}{SUFFIX}"
                name = SegmentName.parse(path)
                if name is None or dot + suffix not in (SUFFIX, GONE_SUFFIX):
                    continue
                has_sidecar = f"{stem}{SIDECAR_SUFFIX}" in names
                nbytes = self._bytes(f"{bucket.directory}/{file}", name, sealed=has_sidecar)
                if has_sidecar and nbytes:
                    sealed[path] = nbytes
                if dot + suffix == GONE_SUFFIX:
                    leaving += nbytes
                elif nbytes:
                    found.append(FileUse(name, nbytes, has_sidecar))
            segments += sorted(found, key=lambda use: (use.name.number, use.name.writer))
        self._sealed = sealed
        return DiskUse(tuple(segments), leaving)

    def _bytes(self, file: str, name: SegmentName, *, sealed: bool) -> int:
        known = self._sealed.get(name.path)
        if known is not None:
            return known
        return self._size(file) + (self._size(name.sidecar) if sealed else 0)

    def _size(self, path: str) -> int:
        try:
            file = self._files.open(path, direct=False)
        except FileNotFoundError:
            return 0
        try:
            return file.size()
        finally:
            file.close()
