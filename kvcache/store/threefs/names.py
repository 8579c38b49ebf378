"""Names through the mount: the system calls the layer makes, as a seam for tests.

3FS's mount remembers a missing name for 5 s and a size for 30 s (its negative and attribute timeouts), so nothing here
asks whether something exists, and no size is ever used to decide where data ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


class Names:
    """Plain system calls; each may raise OSError and each may hang while the mount's server is gone."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def mkdir(self, path: str) -> None:
        """A directory that is there is fine, and is not looked at: a cached miss would deny it."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def list(self, path: str) -> Sequence[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def datasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def free_bytes(self, path: str) -> int:
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize
