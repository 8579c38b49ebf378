"""L1: handles are exact; every wrong field is named."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from headrace.kvcache.handle import ChecksumKind, Handle, HandleMismatch, HandleRejected, LandingPart, PayloadKind

HANDLE = Handle(
    transfer_id="t-1",
    incarnation="a" * 32,
    request_id="r-1",
    attempt=1,
    generation=7,
    layout_fingerprint=b"l" * 32,
    model_fingerprint=b"m" * 32,
    parts=(LandingPart(None, (0, 1), (3, 4), None), LandingPart(0, (2,), (5,), 1)),
    row_bytes=256,
    slot_bytes=64,
    checksum_kind=ChecksumKind.XXH3_64,
)
WRONG: dict[str, tuple[Any, HandleMismatch]] = {
    "transfer_id": ("t-0", HandleMismatch.TRANSFER),
    "incarnation": ("b" * 32, HandleMismatch.INCARNATION),
    "request_id": ("r-2", HandleMismatch.REQUEST),
    "attempt": (2, HandleMismatch.ATTEMPT),
    "generation": (6, HandleMismatch.GENERATION),
    "layout_fingerprint": (b"x" * 32, HandleMismatch.LAYOUT),
    "model_fingerprint": (b"x" * 32, HandleMismatch.MODEL),
    "parts": (HANDLE.parts[:1], HandleMismatch.PARTS),
    "row_bytes": (255, HandleMismatch.SIZES),
    "slot_bytes": (0, HandleMismatch.SIZES),
    "checksum_kind": (ChecksumKind.LANES_64, HandleMismatch.CHECKSUM_KIND),
    "rank": (1, HandleMismatch.RANK),
    "payload": (PayloadKind.EMBEDDING, HandleMismatch.PAYLOAD),
    "metadata_version": (2, HandleMismatch.METADATA_VERSION),
}


def test_every_field_is_compared() -> None:
    """L1: a field that is added without a comparison fails here."""
    assert set(WRONG) == {field.name for field in fields(Handle)}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_named(name: str) -> None:
    """L1: stale, reused, wrong-request and truncated handles are each rejected with their reason."""
    value, reason = WRONG[name]
    wrong = replace(HANDLE, **{name: value})
    assert wrong.check(HANDLE) == (reason,)
    with pytest.raises(HandleRejected) as caught:
        wrong.require(HANDLE)
    assert caught.value.reasons == (reason,)


def test_an_equal_handle_passes() -> None:
    HANDLE.require(replace(HANDLE))
    assert HANDLE.landing_rows == (3, 4, 5)
    assert HANDLE.landing_slots == (1,)


def test_rows_and_blocks_go_in_pairs() -> None:
    with pytest.raises(ValueError, match="one row per block"):
        LandingPart(None, (0, 1), (3,), None)
