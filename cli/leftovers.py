"""What processes that are gone have left in shared memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SHARED: Final = Path("/dev/shm")


def shared_memory() -> set[str]:
    """Names of this user's files in shared memory, of whatever process."""
    names: set[str] = set()
    for entry in os.scandir(SHARED):
        try:
            if entry.stat().st_uid == os.getuid():
                names.add(entry.name)
        except FileNotFoundError:  # gone since it was listed
            continue
    return names


def left_behind(before: set[str]) -> set[str]:
    """Files that have come since `before` and that no living process maps: those of other programs are theirs, and
    what its owner takes along while this looks is not left."""
    found = shared_memory() - before - _mapped()
    return found & shared_memory()


def _mapped() -> set[str]:
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is somebody else's
            continue
        prefix = f"{SHARED}/"
        for line in text.splitlines():
            _, found, name = line.partition(prefix)
            if found:
                names.add(name.removesuffix(" (deleted)"))
    return names
