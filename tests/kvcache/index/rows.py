"""Rows to put into an index."""

from __future__ import annotations

import hashlib
import time

from headrace.kvcache.entries import EntryKind, RetentionClass
from headrace.kvcache.index.base import IndexRow

TAG = hashlib.sha256(b"tenant").digest()[:16]


def soon() -> float:
    """A deadline that a healthy index keeps even on a crowded machine."""
    return time.monotonic() + 30.0


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def row(number: int, group: str = "g0", place: int | None = None, **changes: object) -> IndexRow:
    fields: dict[str, object] = {
        "key": key(number),
        "group": group,
        "place": number * 118_784 if place is None else place,
        "length": 114_048,
        "kind": EntryKind.BLOCK,
        "retention": RetentionClass.CHAT,
        "tokens": 128 * (number + 1),
        "expires_at": 1_800_000_000,
        "tenant_tag": TAG,
    }
    return IndexRow(**(fields | changes))  # type: ignore[arg-type]
