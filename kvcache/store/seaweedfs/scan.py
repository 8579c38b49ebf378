"""Every record that the volumes hold, as their own bytes tell: for a lost index, and for the scrub.

A volume's needles cannot be listed over HTTP; the volume servers' gRPC service can (a copy of the volume's index file
and reads of the first bytes of a needle), so a VolumeFiles does it. Only headers cross the network: 4 KiB per record.
All copies of a volume are asked, since one that was away may lack needles; what is deleted in one copy is deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.seaweedfs.cluster import Cluster, ClusterError, Location, VolumeInfo, VolumeUnknown
from headrace.kvcache.store.seaweedfs.erasures import Erasure, covered
from headrace.kvcache.store.seaweedfs.needles import Needle, belongs, log_collection
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings, TlsFiles
from headrace.kvcache.store.seaweedfs.volume_format import (
    IndexEntry,
    NeedleHead,
    offset_bytes,
    parse_index,
    parse_needle,
)
from headrace.kvcache.store.segments.record import HEADER_BYTES, Header, read_header

_log = logging.getLogger(__name__)


class ListingFailed(Exception):
    """A volume server did not list its needles."""


class VolumeFiles(Protocol):
    """Reads volumes where they lie, over the volume servers' gRPC service. Thread-safe."""

    def index_file(self, location: Location, volume: int, collection: str) -> bytes:
        """The index file of a volume. ListingFailed."""
        ...

    def needles(
        self, location: Location, volume: int, entries: Sequence[IndexEntry], head_bytes: int
    ) -> Iterator[tuple[IndexEntry, bytes]]:
        """The first bytes of each needle (volume_format.blob_size), none of one that the server cannot read.
        ListingFailed: the server does not answer."""
        ...

    def close(self) -> None: ...


OpenVolumeFiles = Callable[[TlsFiles | None], VolumeFiles]
"""Makes them for one store, with its TLS files (services/worker/tier/weed_volumes.WeedVolumes)."""


@dataclass(frozen=True, slots=True)
class FoundRecord:
    header: Header
    needle: Needle


class VolumeScan:
    """Lists what a cluster holds of one store."""

    def __init__(self, settings: SeaweedSettings, cluster: Cluster, files: VolumeFiles, call_s: float = 10.0) -> None:
        self._settings = settings
        self._cluster = cluster
        self._files = files
        self._call_s = call_s

    def erasures(self) -> tuple[Erasure, ...]:
        """Everything that was ever erased. StoreError: some cannot be read now, so a scan would be wrong."""
        found = []
        for info, head in self._heads(logged=True):
            erasure = Erasure.unpack(head.head)
            if erasure is None:
                raise StoreError(f"an erasure in volume {info.volume} is spoilt; no scan can tell what may be shown")
            found.append(erasure)
        return tuple(found)

    def records(self) -> Iterator[FoundRecord]:
        """Headers of all live records that no erasure covers; payloads are not read. StoreError: a volume cannot be
        listed by any of its servers."""
        erasures = self.erasures()
        for info, head in self._heads(logged=False):
            header = read_header(memoryview(head.head))
            if header is None or not belongs(header, info.collection, head.number):
                continue
            if not covered(erasures, header.info, header.sequence):
                yield FoundRecord(header, Needle(info.volume, head.number, head.cookie))

    def _heads(self, logged: bool) -> Iterator[tuple[VolumeInfo, NeedleHead]]:
        log = log_collection(self._settings.collection)
        try:
            width = offset_bytes(self._cluster.version(time.monotonic() + self._call_s))
            volumes = self._cluster.volumes(time.monotonic() + self._call_s)
        except ClusterError as error:
            raise StoreError(f"the volumes of SeaweedFS cannot be listed: {error}") from error
        for info in volumes:
            if (info.collection == log) == logged:
                for head in self._volume(info.volume, info.collection, width, strict=logged):
                    yield info, head

    def _volume(self, volume: int, collection: str, width: int, *, strict: bool) -> Iterator[NeedleHead]:
        try:
            locations = self._cluster.locations(volume, time.monotonic() + self._call_s)
        except VolumeUnknown:
            return  # expired or dropped since it was listed
        except ClusterError as error:
            raise StoreError(f"volume {volume} cannot be found: {error}") from error
        listings: list[tuple[Location, dict[int, IndexEntry]]] = []
        failure: Exception | None = None
        for location in locations:
            try:
                listings.append((location, parse_index(self._files.index_file(location, volume, collection), width)))
            except ListingFailed as error:
                failure = error
        if not listings:
            raise StoreError(f"no server lists volume {volume}: {failure}")
        left = {number for _, entries in listings for number in entries}
        left -= {entry.number for _, entries in listings for entry in entries.values() if entry.deleted}
        for location, entries in listings:
            wanted = [entries[number] for number in sorted(left & entries.keys())]
            try:
                for entry, blob in self._files.needles(location, volume, wanted, HEADER_BYTES):
                    for head in parse_needle(blob, entry.number, HEADER_BYTES):
                        left.discard(entry.number)
                        yield head
            except ListingFailed as error:
                failure = error
        if left and (strict or failure is not None):
            raise StoreError(f"{len(left)} needles of volume {volume} cannot be read: {failure}")
        if left:
            # Every server answered and none has them whole. To wait for them would be to wait for ever.
            _log.warning("%d needles of volume %d are spoilt in all copies", len(left), volume)
