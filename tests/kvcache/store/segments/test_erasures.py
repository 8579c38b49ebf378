"""The log of erasures: fences, torn ends, and what other processes see of it (L25)."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.erasures import LOG, Erasure, Erasures, decode_erasure, encode_erasure
from headrace.kvcache.store.segments.names import Bucket, SegmentName
from tests.kvcache.store.entries import NAMESPACE, OTHER_NAMESPACE, OTHER_TENANT, TENANT

BUCKET = Bucket(NAMESPACE, RetentionClass.CHAT, 1_900_000_000)


def segment(writer: str, number: int, bucket: Bucket = BUCKET) -> str:
    return SegmentName(bucket, writer, number).path


@given(
    st.none() | st.binary(min_size=16, max_size=16),
    st.dictionaries(st.text("abc.-0", min_size=1, max_size=20), st.integers(0, 2**63), max_size=5),
    st.data(),
)
def test_an_erasure_comes_back_whole_or_not_at_all(
    tag: bytes | None, fences: dict[str, int], data: st.DataObject
) -> None:
    encoded = encode_erasure(Erasure(tag, fences))
    assert decode_erasure(encoded + b"more") == (Erasure(tag, fences), len(encoded))
    assert decode_erasure(encoded[: data.draw(st.integers(0, len(encoded) - 1))]) is None


def test_a_fence_covers_what_was_there_and_nothing_later(tmp_path: Path) -> None:
    erasures = Erasures(PosixFileLayer(tmp_path))
    assert not erasures.covers(segment("a-1", 1), TENANT)
    erasures.erase(NAMESPACE, Erasure(TENANT, {"a-1": 3, "b-2": 1}))
    assert erasures.covers(segment("a-1", 3), TENANT)
    assert not erasures.covers(segment("a-1", 4), TENANT)
    assert erasures.covers(segment("b-2", 1), TENANT)
    assert not erasures.covers(segment("c-3", 1), TENANT)
    assert not erasures.covers(segment("a-1", 3), OTHER_TENANT)
    assert not erasures.covers(segment("a-1", 3, Bucket(OTHER_NAMESPACE, RetentionClass.CHAT, 0)), TENANT)
    assert not erasures.covers_all(segment("a-1", 1))
    erasures.erase(NAMESPACE, Erasure(None, {"a-1": 2}))
    assert erasures.covers_all(segment("a-1", 2))
    assert erasures.covers(segment("a-1", 2), OTHER_TENANT)
    assert erasures.covers(segment("a-1", 3), TENANT)
    erasures.close()


def test_others_see_an_erasure_at_their_next_look(tmp_path: Path) -> None:
    """Also when the log was not there at their last one, and when it holds more than one read takes."""
    mine, theirs = (Erasures(PosixFileLayer(tmp_path)) for _ in range(2))
    theirs.refresh({segment("a-1", 1)})
    mine.erase(NAMESPACE, Erasure(TENANT, {f"{'w' * 200}{number}-0": number for number in range(1, 700)} | {"a-1": 1}))
    mine.erase(NAMESPACE, Erasure(OTHER_TENANT, {"a-1": 2}))
    assert not theirs.covers(segment("a-1", 1), TENANT)
    theirs.refresh({segment("a-1", 1)})
    assert theirs.covers(segment("a-1", 1), TENANT)
    assert theirs.covers(segment("a-1", 2), OTHER_TENANT)
    mine.close()
    theirs.close()


def test_a_torn_end_is_overwritten(tmp_path: Path) -> None:
    """It was never acknowledged; what was before it holds, and what comes after it is read."""
    erasures = Erasures(PosixFileLayer(tmp_path))
    erasures.erase(NAMESPACE, Erasure(TENANT, {"a-1": 1}))
    erasures.close()
    log = tmp_path / "v1" / NAMESPACE.hex() / LOG
    log.write_bytes(log.read_bytes() + encode_erasure(Erasure(OTHER_TENANT, {"a-1": 9}))[:-3])
    again = Erasures(PosixFileLayer(tmp_path))
    again.refresh({segment("a-1", 1)})
    assert again.covers(segment("a-1", 1), TENANT)
    assert not again.covers(segment("a-1", 1), OTHER_TENANT)
    again.erase(NAMESPACE, Erasure(OTHER_TENANT, {"a-1": 2}))
    again.close()
    last = Erasures(PosixFileLayer(tmp_path))
    last.refresh({segment("a-1", 1)})
    assert last.covers(segment("a-1", 2), OTHER_TENANT)
    assert not last.covers(segment("a-1", 3), OTHER_TENANT)
    last.close()
