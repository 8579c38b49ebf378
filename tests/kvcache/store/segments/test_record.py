"""Record headers, sidecars and footers: what is read is what was written, and nothing damaged is read."""

from __future__ import annotations

import random
import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvcache.entries import EntryInfo, EntryKind, RetentionClass
from headrace.kvcache.store.segments.names import Bucket, SegmentName
from headrace.kvcache.store.segments.record import (
    ALIGN,
    HEADER_BYTES,
    Header,
    header_crc,
    read_header,
    record_bytes,
    segment_id,
    write_header,
)
from headrace.kvcache.store.segments.sidecar import (
    Footer,
    decode_sidecar,
    encode_sidecar,
    read_footer,
    write_footer,
)

NAMESPACE = bytes(range(32))
IDENTITY = segment_id("v1/some/segment")


def digests(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    info = EntryInfo(
        key=draw(digests(32)),
        kind=draw(st.sampled_from(EntryKind)),
        namespace=NAMESPACE,
        parent=draw(digests(32)),
        tokens=draw(st.integers(1, 2**32 - 1)),
        length=draw(st.integers(1, 2**40)),
        digest=draw(digests(16)),
        retention=draw(st.sampled_from(RetentionClass)),
        tenant_tag=draw(digests(16)),
    )
    return Header(
        info,
        sequence=draw(st.integers(0, 2**63)),
        offset=draw(st.integers(0, 2**40)) * ALIGN,
        expires_at=draw(st.integers(0, 2**33)),
        segment_id=IDENTITY,
    )


@given(headers())
def test_a_header_comes_back(header: Header) -> None:
    page = memoryview(bytearray(HEADER_BYTES))
    write_header(header, page)
    assert read_header(page) == header
    assert header.end == header.offset + record_bytes(header.info.length)


@given(headers(), st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_header_with_a_flipped_bit_is_none(header: Header, bit: int) -> None:
    """L3: wherever in the page, padding included."""
    page = bytearray(HEADER_BYTES)
    write_header(header, memoryview(page))
    page[bit // 8] ^= 1 << bit % 8
    assert read_header(memoryview(page)) is None


@given(st.lists(headers(), max_size=20), st.data())
@settings(max_examples=50)
def test_a_sidecar_comes_back_whole_or_not_at_all(records: list[Header], data: st.DataObject) -> None:
    encoded = encode_sidecar(records, IDENTITY, 123 * ALIGN)
    assert decode_sidecar(memoryview(encoded), IDENTITY, NAMESPACE) == tuple(records)
    assert decode_sidecar(memoryview(encoded), segment_id("another"), NAMESPACE) is None
    cut = data.draw(st.integers(0, len(encoded) - 1))
    assert decode_sidecar(memoryview(encoded[:cut]), IDENTITY, NAMESPACE) is None
    flipped = bytearray(encoded)
    flipped[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert decode_sidecar(memoryview(flipped), IDENTITY, NAMESPACE) is None


def test_a_footer_comes_back_whole_or_not_at_all() -> None:
    footer = Footer(17, 5 * ALIGN, IDENTITY, b"d" * 16)
    page = bytearray(ALIGN)
    write_footer(footer, memoryview(page))
    assert read_footer(memoryview(page)) == footer
    rng = random.Random(1)
    for _ in range(200):
        place = rng.randrange(ALIGN)
        page[place] ^= 0x10
        assert read_footer(memoryview(page)) is None
        page[place] ^= 0x10


def test_segment_names_come_back() -> None:
    name = SegmentName(Bucket(NAMESPACE, RetentionClass.AGENT, 1_800_000_000), "host.a_b-0f3c", 12)
    assert SegmentName.parse(name.path) == name
    assert name.path == f"v1/{NAMESPACE.hex()}/agent/1800000000/host.a_b-0f3c-12.seg"
    for wrong in (
        name.path.replace("v1/", "v2/"),
        name.path.replace("agent", "batch"),
        name.path.replace(".seg", ".idx"),
        name.path.replace("-12", "-x"),
        name.path.replace("1800000000", "-1"),
        name.path.replace(NAMESPACE.hex(), NAMESPACE.hex()[2:]),
        name.path.replace("host.a_b-0f3c", "nodash"),
    ):
        assert SegmentName.parse(wrong) is None, wrong


@given(fields=st.binary(min_size=196, max_size=196))
def test_the_checksum_of_a_header_is_the_crc_of_all_of_it(fields: bytes) -> None:
    """The plain twin walks the zeros."""
    page = fields + bytes(HEADER_BYTES - 4 - len(fields))
    assert header_crc(memoryview(fields)) == zlib.crc32(page)
