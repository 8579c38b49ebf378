"""Compile and load records.cpp, and check it once against its twins in Python."""

from __future__ import annotations

import ctypes
import logging
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headrace.compiler import NativeUnavailable, compiled
from headrace.kvcache.store.segments.record import FIELD_BYTES, HEADER_BYTES, stamp_header

_UNIT = Path(__file__).parent / "records.cpp"
_FLAGS = ("-std=c++17", "-O2", "-pthread", "-fPIC")

_log = logging.getLogger(__name__)


class Outcome(ctypes.Structure):
    """How one run of records ended: `error` is its errno, 0 when all of it was written."""

    _fields_ = (("tag", ctypes.c_int64), ("error", ctypes.c_int32))


@dataclass(frozen=True)
class RecordsLibrary:
    """The functions of records.cpp."""

    free: ctypes.CDLL
    """Called without the interpreter lock."""
    locked: ctypes.PyDLL
    """Called with it: they touch Python's objects."""


@cache
def records_library() -> RecordsLibrary | None:
    """Built if needed (2 s, once on a machine) and loaded; None where it cannot be had, which is said in the log."""
    try:
        return load()
    except NativeUnavailable as reason:
        _log.warning("the store writes at about half its speed: %s", reason)
        return None


def load() -> RecordsLibrary:
    """Raises NativeUnavailable."""
    path = compiled(_UNIT, _FLAGS, ("-pthread",), without="let Python threads write the store's records")
    try:
        library = RecordsLibrary(ctypes.CDLL(str(path)), ctypes.PyDLL(str(path)))
    except OSError as error:
        raise NativeUnavailable(f"{path} does not load: {error}") from error
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("headrace_records_stamp", None, [pointer, integer]),
        ("headrace_writers_new", pointer, [integer] * 2),
        ("headrace_writers_submit", None, [pointer] + [integer] * 4 + [pointer] * 2),
        ("headrace_writers_collect", integer, [pointer, pointer, integer, integer]),
        ("headrace_writers_close", None, [pointer]),
        ("headrace_writers_free", None, [pointer]),
    ):
        call = getattr(library.free, name)
        call.restype, call.argtypes = result, arguments
    fill = library.locked.headrace_records_fill
    fill.restype, fill.argtypes = integer, [ctypes.py_object, integer, pointer, pointer]
    _self_test(library, path)
    return library


def _self_test(library: RecordsLibrary, path: Path) -> None:
    """A header as Python stamps it."""
    fields = bytes(range(256))[:FIELD_BYTES]
    ours = bytearray(fields.ljust(HEADER_BYTES, b"\0"))
    theirs = (ctypes.c_uint8 * HEADER_BYTES).from_buffer_copy(ours)
    stamp_header(memoryview(ours))
    library.free.headrace_records_stamp(theirs, FIELD_BYTES)
    if bytes(theirs) != ours:
        raise NativeUnavailable(f"{path} computes a wrong checksum of a header")


def main() -> None:
    """Compile ahead of time; exit status 1 and the reason where that is impossible."""
    try:
        load()
    except NativeUnavailable as reason:
        sys.exit(str(reason))


if __name__ == "__main__":
    main()
