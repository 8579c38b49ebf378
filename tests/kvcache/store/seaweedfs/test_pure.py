"""The parts of the SeaweedFS engine that need no server."""

from __future__ import annotations

import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.entries import EntryKind, RetentionClass
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.retention.classes import DEFAULT
from headrace.kvcache.store.seaweedfs.budget import ReadBudget
from headrace.kvcache.store.seaweedfs.erasures import ERASURE_BYTES, Erasure
from headrace.kvcache.store.seaweedfs.known import KnownKeys
from headrace.kvcache.store.seaweedfs.needles import Needle, group_of, needle_of
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings, parse_url
from headrace.kvcache.store.seaweedfs.ttl import CLOCK_SKEW_S, FOREVER, ttl_for, ttl_seconds
from headrace.kvcache.store.seaweedfs.volume_format import (
    IndexEntry,
    blob_size,
    offset_bytes,
    parse_index,
    parse_needle,
)
from headrace.kvcache.store.segments.names import Bucket
from tests.kvcache.store.entries import NAMESPACE, OTHER_NAMESPACE, OTHER_TENANT, TENANT, FakeWall, block

DAY = 86_400


@given(st.integers(1, 200 * 7 * DAY))
def test_a_time_to_live_never_ends_early(life: int) -> None:
    ttl = ttl_for(life)
    assert ttl_seconds(ttl) >= life + CLOCK_SKEW_S
    assert 1 <= int(ttl[:-1]) <= 255


def test_times_to_live_of_the_classes() -> None:
    """AGENT 3 d in buckets of 1 h, CHAT 7 d in buckets of 4 h: an hour more each, for clocks that differ."""
    for retention, expected in ((RetentionClass.AGENT, "74h"), (RetentionClass.CHAT, "173h")):
        life = DEFAULT.of[retention]
        assert ttl_for(life.life_s + life.bucket_s) == expected
    assert ttl_seconds(FOREVER) == 0


@pytest.mark.parametrize("life", [0, -1, 300 * 7 * DAY])
def test_impossible_lives_are_refused(life: int) -> None:
    with pytest.raises(StoreError):
        ttl_for(life)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2**39), st.integers(-1, 2**31 - 1)), max_size=30),
    st.sampled_from([4, 5]),
    st.integers(0, 15),
)
def test_the_last_entry_of_an_index_file_holds(log: list[tuple[int, int, int]], width: int, cut: int) -> None:
    data = b""
    expected: dict[int, IndexEntry] = {}
    for number, units, size in log:
        units %= 1 << 8 * width
        low, high = units & 0xFFFFFFFF, units >> 32
        data += struct.pack(">QI", number, low) + (bytes([high]) if width == 5 else b"") + struct.pack(">i", size)
        gone = size < 0 or units == 0
        expected[number] = IndexEntry(number, 0 if gone else units * 8, -1 if gone else size)
    assert parse_index(data + b"x" * cut, width) == expected


def test_a_needle_is_read_only_if_it_is_the_one_asked_for() -> None:
    blob = struct.pack(">IQII", 0xABCD, 77, 5_000, 4_100) + b"d" * 4_096 + b"more"
    (head,) = parse_needle(blob, 77, 4_096)
    assert (head.number, head.cookie, head.head) == (77, 0xABCD, b"d" * 4_096)
    assert not list(parse_needle(blob, 78, 4_096))
    assert not list(parse_needle(blob[:10], 77, 4_096))
    assert blob_size(IndexEntry(77, 8, 60), 4_096) == 60


def test_only_known_builds_are_scanned() -> None:
    assert (offset_bytes("8000GB 4.48 pypi linux"), offset_bytes("30GB 3.9")) == (5, 4)
    with pytest.raises(StoreError, match="unknown"):
        offset_bytes("900TB 9")


def test_erasures_survive_packing_and_cover_what_was_before() -> None:
    """L25."""
    mine, theirs = block("a", 0).info, block("b", 0, tenant=OTHER_TENANT, namespace=OTHER_NAMESPACE).info
    for erasure in (Erasure(100, tenant_tag=TENANT), Erasure(100, namespace=NAMESPACE)):
        packed = erasure.pack()
        assert len(packed) == ERASURE_BYTES
        assert Erasure.unpack(packed + b"padding") == erasure
        assert erasure.covers(mine, 100)
        assert not erasure.covers(mine, 101)
        assert not erasure.covers(theirs, 100)
        for place in range(len(packed)):
            spoilt = packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :]
            assert Erasure.unpack(spoilt) is None or spoilt[10] != packed[10]
        assert Erasure.unpack(packed[:-1]) is None
    group = group_of(Bucket(NAMESPACE, RetentionClass.CHAT, 5), 7)
    assert Erasure(1, namespace=NAMESPACE).may_cover(OTHER_TENANT, group)
    assert not Erasure(1, namespace=OTHER_NAMESPACE).may_cover(TENANT, group)


def test_rows_say_where_a_needle_lies() -> None:
    needle = Needle(12, (1 << 64) - 1, 0xDEADBEEF)
    row = row_at(needle.place, group_of(Bucket(NAMESPACE, RetentionClass.AGENT, 3_600), 12))
    assert needle_of(row) == needle
    assert needle.path == "/12,ffffffffffffffffdeadbeef"
    for group in ("v1/x/agent/3600/12", f"v1/{NAMESPACE.hex()}/agent/3600/node-1.seg", "12"):
        assert needle_of(row_at(1, group)) is None


def test_what_is_known_is_not_written_again_unless_its_life_is_half_over() -> None:
    wall = FakeWall()
    known = KnownKeys(DEFAULT, wall, limit=2)
    row = row_at(1, "g", expires_at=int(wall.now) + 3 * DAY, retention=RetentionClass.AGENT)
    assert not known.has(row.key, RetentionClass.AGENT)
    known.add([row])
    assert known.has(row.key, RetentionClass.AGENT)
    assert not known.has(row.key, RetentionClass.CHAT), "a longer class takes it over"
    wall.now += 1.6 * DAY
    assert not known.has(row.key, RetentionClass.AGENT)
    wall.now -= 1.6 * DAY
    known.add([row_at(number, "g", key=bytes([number]) * 32) for number in (2, 3)])
    assert not known.has(row.key, RetentionClass.AGENT), "forgotten: the oldest of more than the limit"
    known.discard([bytes([3]) * 32])
    assert not known.has(bytes([3]) * 32, RetentionClass.AGENT)


def test_the_read_budget_is_kept_and_given_back() -> None:
    """L11, L12."""
    budget = ReadBudget(100)
    assert budget.take(60, 0.0)
    assert not budget.take(60, time.monotonic() + 0.001)
    budget.give(60)
    assert budget.take(500, 0.0), "alone, anything goes"
    budget.give(500)
    assert budget.taken == 0


def test_settings_are_refused_at_the_border() -> None:
    assert parse_url("seaweedfs://a:9333,b.local:9333/") == (("a:9333", "b.local:9333"), None)
    for url in ("seaweedfs://", "seaweedfs://a", "http://a:1", "seaweedfs://a:1,b"):
        with pytest.raises(StoreError):
            parse_url(url)
    for wrong in ({"replication": "3"}, {"collection": "a_b"}, {"readers": 0}, {"write_timeout_s": 0.0}):
        with pytest.raises(StoreError):
            SeaweedSettings(("a:1",), **wrong)  # type: ignore[arg-type]
    assert SeaweedSettings(("a:1",), replication="110").copies == 3


def row_at(
    place: int,
    group: str,
    *,
    key: bytes = b"k" * 32,
    expires_at: int = 5_000_000_000,
    retention: RetentionClass = RetentionClass.AGENT,
) -> IndexRow:
    return IndexRow(key, group, place, 100, EntryKind.BLOCK, retention, 128, expires_at, TENANT)
