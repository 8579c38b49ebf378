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
