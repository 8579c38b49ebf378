"""Payloads into the memory that the disk reads from."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from headrace.kvcache.store.segments.buffers import Buffer
from headrace.kvcache.store.segments.native.library import records_library
from headrace.kvcache.store.segments.record import HEADER_BYTES

_COPY_LOCKED = 256 << 10
_ZERO_PAGE = bytes(HEADER_BYTES)


def fill(buffers: Sequence[Buffer], payloads: list[bytes | memoryview]) -> None:
    """Each payload behind the page of its record's header, zeros around it: nothing of an earlier record is written
    again (L25). The first bytes of a header page, and no others, are written afterwards."""
    library = records_library()
    if library is None:
        for buffer, payload in zip(buffers, payloads, strict=True):
            fill_one(buffer, payload)
        return
    records = array("Q", [buffer.address for buffer in buffers])
    sizes = array("Q", [buffer.size for buffer in buffers])
    library.locked.headrace_records_fill(payloads, len(payloads), records.buffer_info()[0], sizes.buffer_info()[0])


def fill_one(buffer: Buffer, payload: bytes | memoryview) -> None:
    """The twin without C++. A block is copied under the interpreter lock: that takes 25 µs, and getting the lock back
    from a busy process took 100 µs and more (measured). A snapshot is copied by numpy without it."""
    end = HEADER_BYTES + len(payload)
    buffer.view[:HEADER_BYTES] = _ZERO_PAGE
    if len(payload) <= _COPY_LOCKED:
        buffer.view[HEADER_BYTES:end] = payload
    else:
        buffer.array[HEADER_BYTES:end] = np.frombuffer(payload, dtype=np.uint8)
    buffer.view[end:] = _ZERO_PAGE[: buffer.size - end]
