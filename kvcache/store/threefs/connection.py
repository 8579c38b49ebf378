"""One life of the mount: a read ring and a write ring, made on one FUSE process and dead with it.

A new FUSE process knows neither rings nor open files of the old one; after a reconnection everything is made anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time

from headrace.kvcache.store.threefs.abi import Library
from headrace.kvcache.store.threefs.names import Names
from headrace.kvcache.store.threefs.ring import Ring
from headrace.kvcache.store.threefs.settings import ThreeFsSettings

_GONE = frozenset({errno.ENOTCONN, errno.ECONNABORTED, errno.ESHUTDOWN, errno.ENODEV, errno.EHOSTDOWN, errno.ENXIO})


def is_gone(error: OSError) -> bool:
    """Whether an error says that the mount itself is not there, rather than that one file or one I/O failed."""
    return error.errno in _GONE


def register(library: Library, fd: int) -> None:
    """Register an fd that was just opened. A number that is registered already belongs to a file which was closed while
    the mount was gone, when deregistering does nothing: that registration names another file and must go first."""
    try:
        library.register(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise OSError(errno.ENOTCONN, f"the file is not on a live 3FS: {error}") from error
        library.deregister(fd)
        library.register(fd)


class Connection:
    """Raises OSError when it cannot be made. Making and closing one may hang with the mount."""

    def __init__(self, library: Library, root: str, settings: ThreeFsSettings) -> None:
        self._library = library
        mount = library.mount_point(root)
        if mount is None:
            raise OSError(errno.ENODEV, f"{root} is not on a mounted 3FS")
        self.mount = mount
        slot = settings.slot_bytes
        self.reads = Ring(library, mount, read=True, slots=settings.read_bytes // slot, slot_bytes=slot)
        try:
            self.writes = Ring(library, mount, read=False, slots=settings.write_bytes // slot, slot_bytes=slot)
        except OSError:
            self.reads.close(0.0)
            raise

    def probe(self, names: Names, root: str, timeout_s: float) -> None:
        """Write and read back a page through both rings. OSError when that fails: the mount is not usable."""
        deadline = time.monotonic() + timeout_s
        path = os.path.join(root, f".probe-{secrets.token_hex(8)}")
        page = secrets.token_bytes(4096)
        fd = names.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            register(self._library, fd)
            try:
                back = memoryview(bytearray(len(page)))
                written = self.writes.transfer(fd, [memoryview(page)], 0, deadline)
                if written != len(page) or self.reads.transfer(fd, [back], 0, deadline) != len(page) or back != page:
                    raise OSError(errno.EIO, f"a page written to {path} does not read back")
            finally:
                self._library.deregister(fd)
        finally:
            names.close(fd)
            with contextlib.suppress(FileNotFoundError):
                names.unlink(path)

    def close(self, timeout_s: float) -> None:
        """Destroy the rings, and their names in the mount. The published hf3fs_iordestroy looks for a ring's name with
        its flags in decimal where creation wrote them in binary, and so leaves the name of every ring with flags."""
        for ring in (self.reads, self.writes):
            ring.close(timeout_s)
        rings = {ring.id.hex() for ring in (self.reads, self.writes)}
        folder = os.path.join(self.mount, "3fs-virt", "iovs")
        for name in os.listdir(folder):
            if name.replace("-", "")[:32] in rings:
                os.unlink(os.path.join(folder, name))
