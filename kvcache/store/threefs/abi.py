"""`libhf3fs_api_shared.so` by ctypes: our own declarations of the ABI that deepseek-ai/3FS publishes in
src/lib/api/hf3fs_usrbio.h.

Calls return what the library returns, turned into OSError where it reports an error. ctypes releases the GIL around
each. The library is not thread-safe: one thread at a time may prepare and submit on a ring, and one may wait on it
(ring.py sees to both).
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kvcache.store.base import StoreError

DEFAULT_LIBRARY = "libhf3fs_api_shared.so"
FORBID_READ_HOLES = 2
"""Flag of a ring: without it a chunk that is missing before one that exists reads as zeros (L3)."""

_MOUNT_POINT_BYTES = 256


class Iov(ctypes.Structure):
    """struct hf3fs_iov: memory shared with the FUSE process, where data is read to and written from."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("iovh", ctypes.c_void_p),
        ("id", ctypes.c_uint8 * 16),
        ("mount_point", ctypes.c_char * _MOUNT_POINT_BYTES),
        ("size", ctypes.c_size_t),
        ("block_size", ctypes.c_size_t),
        ("numa", ctypes.c_int),
    )


class Ior(ctypes.Structure):
    """struct hf3fs_ior: a ring of requests and completions, for reads or for writes."""

    _fields_ = (
        ("iov", Iov),
        ("iorh", ctypes.c_void_p),
        ("mount_point", ctypes.c_char * _MOUNT_POINT_BYTES),
        ("for_read", ctypes.c_bool),
        ("io_depth", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("timeout", ctypes.c_int),
        ("flags", ctypes.c_uint64),
    )


class Cqe(ctypes.Structure):
    """struct hf3fs_cqe: one completion. `result` is a number of bytes or −errno."""

    _fields_ = (
        ("index", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("result", ctypes.c_int64),
        ("userdata", ctypes.c_void_p),
    )


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_int64), ("tv_nsec", ctypes.c_int64))


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "hf3fs_is_hf3fs": (ctypes.c_bool, [ctypes.c_int]),
    "hf3fs_extract_mount_point": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p]),
    "hf3fs_iovcreate": (
        ctypes.c_int,
        [ctypes.POINTER(Iov), ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int],
    ),
    "hf3fs_iovdestroy": (None, [ctypes.POINTER(Iov)]),
    "hf3fs_iorcreate4": (
        ctypes.c_int,
        [
            ctypes.POINTER(Ior),
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_bool,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
        ],
    ),
    "hf3fs_iordestroy": (None, [ctypes.POINTER(Ior)]),
    "hf3fs_reg_fd": (ctypes.c_int, [ctypes.c_int, ctypes.c_uint64]),
    "hf3fs_dereg_fd": (None, [ctypes.c_int]),
    "hf3fs_prep_io": (
        ctypes.c_int,
        [
            ctypes.POINTER(Ior),
            ctypes.POINTER(Iov),
            ctypes.c_bool,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_size_t,
            ctypes.c_uint64,
            ctypes.c_void_p,
        ],
    ),
    "hf3fs_submit_ios": (ctypes.c_int, [ctypes.POINTER(Ior)]),
    "hf3fs_wait_for_ios": (
        ctypes.c_int,
        [ctypes.POINTER(Ior), ctypes.POINTER(Cqe), ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Timespec)],
    ),
}


class UsrbioUnavailable(StoreError):
    """The library of 3FS cannot be loaded; the message says what to install or to set."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a ring reports, in whatever order I/O ended."""

    token: int
    """The userdata of the request: the only thing that says which request it was."""
    result: int
    """Bytes moved, or −errno."""


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
    return result


class Library:
    """The loaded library."""

    def __init__(self, path: str = DEFAULT_LIBRARY) -> None:
        """Raises UsrbioUnavailable when it is not there or is not this library."""
        try:
            # Local: 3FS links folly, jemalloc and its own copies of much else, which must not win over others' symbols.
            self._calls = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
        except OSError as error:
            raise UsrbioUnavailable(
                f"{path} cannot be loaded ({error}); build 3FS's target hf3fs_api_shared and give its path as "
                "3fs:///mount/directory?lib=/path/to/libhf3fs_api_shared.so"
            ) from error
        self.path = path
        missing = [name for name in _SIGNATURES if not hasattr(self._calls, name)]
        if missing:
            raise UsrbioUnavailable(f"{path} has no {', '.join(missing)}: it is not a USRBIO library of this version")
        for name, (result, arguments) in _SIGNATURES.items():
            call = getattr(self._calls, name)
            call.restype, call.argtypes = result, arguments

    def is_3fs(self, fd: int) -> bool:
        """Whether an open file lies on a 3FS whose FUSE process answers (an ioctl to it)."""
        return bool(self._calls.hf3fs_is_hf3fs(fd))

    def mount_point(self, path: str) -> str | None:
        """The mount point above `path`, or None when that is not on a 3FS."""
        buffer = ctypes.create_string_buffer(_MOUNT_POINT_BYTES)
        length = self._calls.hf3fs_extract_mount_point(buffer, len(buffer), os.fsencode(path))
        return os.fsdecode(buffer.value) if 0 < length <= len(buffer) else None

    def create_memory(self, mount: str, nbytes: int) -> Iov:
        iov = Iov()
        _check(self._calls.hf3fs_iovcreate(ctypes.byref(iov), os.fsencode(mount), nbytes, 0, -1), "hf3fs_iovcreate")
        return iov

    def destroy_memory(self, iov: Iov) -> None:
        self._calls.hf3fs_iovdestroy(ctypes.byref(iov))

    def create_ring(self, mount: str, entries: int, *, read: bool) -> Ior:
        """A ring that works requests off as soon as it sees them, with holes forbidden."""
        ior = Ior()
        result = self._calls.hf3fs_iorcreate4(
            ctypes.byref(ior), os.fsencode(mount), entries, read, 0, 0, -1, FORBID_READ_HOLES
        )
        _check(result, "hf3fs_iorcreate4")
        return ior

    def destroy_ring(self, ior: Ior) -> None:
        self._calls.hf3fs_iordestroy(ctypes.byref(ior))

    def register(self, fd: int) -> None:
        """Make `fd` usable in prepare. Raises OSError: EBADF when it is not on a live 3FS, EINVAL when this number is
        registered already."""
        result = self._calls.hf3fs_reg_fd(fd, 0)
        if result > 0:
            raise OSError(result, f"hf3fs_reg_fd: {os.strerror(result)}")

    def deregister(self, fd: int) -> None:
        """Does nothing, silently, while the mount is gone: the registration then stays under this number."""
        self._calls.hf3fs_dereg_fd(fd)

    def prepare(self, ior: Ior, iov: Iov, address: int, fd: int, offset: int, nbytes: int, token: int) -> None:
        """Put one request into the ring; it may run before submit. Raises OSError: EAGAIN when the ring is full."""
        result = self._calls.hf3fs_prep_io(
            ctypes.byref(ior), ctypes.byref(iov), ior.for_read, address, fd, offset, nbytes, token
        )
        _check(result, "hf3fs_prep_io")

    def submit(self, ior: Ior) -> None:
        _check(self._calls.hf3fs_submit_ios(ctypes.byref(ior)), "hf3fs_submit_ios")

    def wait(self, ior: Ior, space: ctypes.Array[Cqe], until: float) -> Sequence[Completion]:
        """At least one completion, or none once the wall clock reads `until` (the library takes nothing else). `space`
        is reused between calls."""
        fraction, whole = math.modf(until)
        limit = _Timespec(int(whole), int(fraction * 1e9))
        count = self._calls.hf3fs_wait_for_ios(ctypes.byref(ior), space, len(space), 1, ctypes.byref(limit))
        _check(count, "hf3fs_wait_for_ios")
        return [Completion(space[i].userdata or 0, space[i].result) for i in range(count)]
