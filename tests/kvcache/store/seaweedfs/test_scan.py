"""A scan over copies that differ, played by a double; the real one is in test_contract.py and test_faults.py."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.seaweedfs.cluster import Location, VolumeInfo, VolumeUnknown
from headrace.kvcache.store.seaweedfs.erasures import Erasure
from headrace.kvcache.store.seaweedfs.needles import (
    Needle,
    collection_of,
    fill_header,
    header_for,
    log_collection,
    new_record,
)
from headrace.kvcache.store.seaweedfs.scan import ListingFailed, VolumeScan
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.seaweedfs.volume_format import IndexEntry
from tests.kvcache.store.entries import NAMESPACE, OTHER_TENANT, TENANT, block

COLLECTION = collection_of("headrace", NAMESPACE)
LOG = log_collection("headrace")


@dataclass
class FakeCopy:
    """One server's copy of volumes: volume → needle id → bytes, None if deleted."""

    volumes: dict[int, dict[int, bytes | None]]
    lists: bool = True
    reads: bool = True


@dataclass
class FakeFiles:
    """VolumeFiles and Cluster over copies."""

    copies: dict[str, FakeCopy]
    collections: dict[int, str] = field(default_factory=lambda: {1: COLLECTION, 9: LOG})

    def version(self, deadline: float) -> str:
        return "30GB 4"

    def volumes(self, deadline: float) -> Sequence[VolumeInfo]:
        return [VolumeInfo(number, collection, "", 0, 0, 2) for number, collection in self.collections.items()]

    def locations(self, volume: int, deadline: float, *, fresh: bool = False) -> tuple[Location, ...]:
        found = tuple(Location(name, name) for name, copy in self.copies.items() if volume in copy.volumes)
        if not found:
            raise VolumeUnknown(volume)
        return found

    def index_file(self, location: Location, volume: int, collection: str) -> bytes:
        copy = self.copies[location.server]
        assert collection == self.collections[volume]
        if not copy.lists:
            raise ListingFailed(f"{location.server} is away")
        entries = copy.volumes[volume].items()
        return b"".join(struct.pack(">QIi", n, 1, -1 if data is None else len(data)) for n, data in entries)

    def needles(
        self, location: Location, volume: int, entries: Sequence[IndexEntry], head_bytes: int
    ) -> Iterator[tuple[IndexEntry, bytes]]:
        copy = self.copies[location.server]
        for entry in entries:
            if not copy.reads:
                raise ListingFailed(f"{location.server} is away")
            data = copy.volumes[volume][entry.number]
            assert data is not None
            head = struct.pack(">IQII", 7, entry.number, len(data), len(data)) + data[:head_bytes]
            yield entry, b"" if data == b"spoilt" else head

    def close(self) -> None: ...


def record(name: str, number: int, *, tenant: bytes = TENANT, sequence: int = 50) -> bytes:
    entry = block(name, 0, length=10, tenant=tenant)
    data = new_record(entry.payload)
    fill_header(data, header_for(entry.info, Needle(1, number, 7), COLLECTION, sequence, 2_000_000_000))
    return bytes(data)


def scanned(copies: dict[str, FakeCopy]) -> list[int]:
    """Needle ids of the records that a scan finds."""
    files = FakeFiles(copies)
    scan = VolumeScan(SeaweedSettings(("m:1",)), files, files)  # type: ignore[arg-type]
    return [found.needle.number for found in scan.records()]


def test_copies_are_joined_and_what_one_deleted_is_deleted() -> None:
    first = {1: record("a", 1), 2: record("b", 2), 3: None}
    second = {2: record("b", 2), 3: record("c", 3), 4: record("d", 4)}
    assert scanned({"x": FakeCopy({1: first}), "y": FakeCopy({1: second})}) == [1, 2, 4]


def test_a_copy_that_is_away_is_made_up_for_by_the_other() -> None:
    needles: dict[int, bytes | None] = {1: record("a", 1), 2: record("b", 2)}
    whole = FakeCopy({1: needles})
    assert scanned({"x": FakeCopy({1: needles}, lists=False), "y": whole}) == [1, 2]
    assert scanned({"x": FakeCopy({1: needles}, reads=False), "y": whole}) == [1, 2]
    assert scanned({"x": FakeCopy({1: {**needles, 1: b"spoilt"}}), "y": whole}) == [2, 1]


def test_a_volume_that_nobody_lists_or_reads_fails_the_scan() -> None:
    """A rebuild that called itself complete without it would lose what is durable."""
    needles: dict[int, bytes | None] = {1: record("a", 1)}
    for copy in (FakeCopy({1: needles}, lists=False), FakeCopy({1: needles}, reads=False)):
        with pytest.raises(StoreError, match="volume 1"):
            scanned({"x": copy, "y": copy})


def test_what_is_spoilt_everywhere_is_left_out() -> None:
    rubbish: dict[int, bytes | None] = {1: b"spoilt", 2: b"no record", 3: record("a", 4), 5: record("e", 5)}
    assert scanned({"x": FakeCopy({1: rubbish}), "y": FakeCopy({1: rubbish})}) == [5]


def test_erasures_hide_records_up_to_their_time() -> None:
    """L25."""
    log: dict[int, bytes | None] = {1: Erasure(50, tenant_tag=TENANT).pack()}
    records: dict[int, bytes | None] = {
        1: record("a", 1),
        2: record("b", 2, sequence=51),
        3: record("c", 3, tenant=OTHER_TENANT),
    }
    assert scanned({"x": FakeCopy({1: records, 9: log})}) == [2, 3]
    for spoilt in (b"HRERASED" + b"\x00" * 60, b"spoilt"):
        log[1] = spoilt
        with pytest.raises(StoreError, match="volume 9"):
            scanned({"x": FakeCopy({1: records, 9: log})})
