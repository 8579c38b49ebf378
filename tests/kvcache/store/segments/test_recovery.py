"""What a damaged segment still tells: every whole record, wherever the damage is, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.keys import Key
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.names import Bucket, SegmentName
from headrace.kvcache.store.segments.record import (
    ALIGN,
    HEADER_BYTES,
    Header,
    aligned,
    record_bytes,
    segment_id,
    write_header,
)
from headrace.kvcache.store.segments.recovery import FoundSegment, find_segments, read_records
from tests.kvcache.store.entries import NAMESPACE, block

NAME = SegmentName(Bucket(NAMESPACE, RetentionClass.CHAT, 1_900_000_000), "node-ab", 1)
LENGTHS = (1, 4_096, 5_000, 70_000, 1_500_000, 4_300_000)
"""The last is larger than the window of a scan."""


def written(lengths: list[int], identity: bytes) -> tuple[bytearray, list[Header]]:
    """A segment's bytes, and the records in it."""
    data = bytearray()
    headers = []
    for number, length in enumerate(lengths):
        entry = block("chain", number, length=length)
        header = Header(entry.info, number + 1, len(data), NAME.bucket.end, identity)
        page = bytearray(HEADER_BYTES)
        write_header(header, memoryview(page))
        data += page + bytes(entry.payload).ljust(aligned(length), b"\0")
        headers.append(header)
    return data, headers


def recovered(root: Path, data: bytes, *, direct: bool = True) -> list[Key]:
    path = root / NAME.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    found = FoundSegment(NAME, sidecar=False)
    return [header.info.key for header in read_records(PosixFileLayer(root), found, direct=direct)]


@pytest.mark.parametrize("seed", range(12))
def test_every_whole_record_is_found_and_no_other(tmp_path: Path, seed: int) -> None:
    """The twin is the list of what was damaged: torn, zeroed or flipped anywhere, in the middle of a group as well."""
    rng = random.Random(seed)
    data, headers = written([rng.choice(LENGTHS) for _ in range(12)], segment_id(NAME.path))
    data += bytes(rng.choice((0, 1, 300)) * ALIGN)
    whole = {header.info.key for header in headers}
    for header in rng.sample(headers, rng.randint(0, 6)):
        end = header.offset + HEADER_BYTES + header.info.length
        kind = rng.choice(("zero header", "zero payload", "flip", "all"))
        if kind == "zero header":
            data[header.offset : header.offset + ALIGN] = bytes(ALIGN)
        elif kind == "zero payload":
            data[header.offset + HEADER_BYTES : end] = bytes(header.info.length)
        elif kind == "all":
            data[header.offset : header.end] = bytes(record_bytes(header.info.length))
        else:
            data[rng.randrange(header.offset + HEADER_BYTES, end)] ^= 1
        whole.discard(header.info.key)
    assert recovered(tmp_path, bytes(data)) == [h.info.key for h in headers if h.info.key in whole]


@pytest.mark.parametrize("direct", [True, False])
def test_a_cut_segment_keeps_what_is_before_the_cut(tmp_path: Path, direct: bool) -> None:
    data, headers = written([5_000, 70_000, 1, 4_300_000, 9_000], segment_id(NAME.path))
    for cut in (0, 1, ALIGN, headers[1].offset + 100, headers[2].end, headers[3].offset + 4_200_000, len(data)):
        expected = [h.info.key for h in headers if h.offset + HEADER_BYTES + h.info.length <= cut]
        assert recovered(tmp_path, bytes(data[:cut]), direct=direct) == expected, cut


def test_a_header_inside_a_payload_is_no_record(tmp_path: Path) -> None:
    """L1: what looks like a record of another segment or another place is not taken for one, even behind damage."""
    foreign, _ = written([5_000, 5_000], segment_id("v1/another/segment"))
    own, headers = written([len(foreign), 5_000, 5_000], segment_id(NAME.path))
    # The first record's payload becomes two records of another segment; its own header is lost.
    own[headers[0].offset : headers[0].offset + ALIGN] = bytes(ALIGN)
    own[HEADER_BYTES : HEADER_BYTES + len(foreign)] = foreign
    # A record of this segment, copied to where it does not belong.
    moved = own + own[headers[1].offset : headers[1].end]
    assert recovered(tmp_path, bytes(moved)) == [headers[1].info.key, headers[2].info.key]


def test_strangers_in_the_tree_are_passed_by(tmp_path: Path) -> None:
    data, _ = written([100], segment_id(NAME.path))
    recovered(tmp_path, bytes(data))
    for stranger in ("v1/notes.txt", "v1/ab/chat/1/x.seg", f"{NAME.bucket.directory}/core", "lost+found/y"):
        (tmp_path / stranger).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / stranger).write_bytes(b"?")
    assert [found.name for found in find_segments(PosixFileLayer(tmp_path))] == [NAME]
