"""Files that processes share: whether one has changed, and writing one as a whole."""

from __future__ import annotations

import os
from pathlib import Path

Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp:
    """Inode, size and time of the last change in ns: another one after each change, also after a replacement of equal
    size and time. Raises OSError."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def write_whole(path: Path, data: bytes, mode: int, *, sync: bool = False) -> None:
    """Write `path` anew, with `mode` less the umask from the first moment: a key is never readable by others.

    Readers find the former file or the whole new one. With `sync` its bytes are on disk by then. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
