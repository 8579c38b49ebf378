"""A file of JSON lines that grows by whole lines: what long runs write, so that a later one goes on where they ended.

Each entry is one write() to a descriptor that appends: a reader, and the next run after a kill, find whole entries and
at most one torn line at the end, which is dropped. One writer at a time holds the file.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.services.runtime.files import write_whole

Entry = dict[str, Any]
MODE = 0o666


class LineLogError(ValueError):
    """The file is none of this kind, or somebody else writes to it; the message names it."""


class LineLog:
    """Opened for appending; holds a lock until it is closed."""

    def __init__(self, path: Path, keep: Callable[[Entry], bool] = lambda _: True) -> None:
        """Open or make `path`. Entries that `keep` refuses, and a torn last line, are taken out of it, all at once.

        Raises LineLogError, OSError.
        """
        self.path = path
        self._descriptor = _locked(path)
        try:
            data = path.read_bytes()
            found = parse_lines(data, str(path))
            self.entries: Sequence[Entry] = tuple(entry for entry in found if keep(entry))
            """What the file held."""
            whole = b"".join(map(line_of, self.entries))
            if whole != data:
                write_whole(path, whole, MODE)
                former, self._descriptor = self._descriptor, _locked(path)
                os.close(former)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, entry: Entry) -> None:
        """Add one entry. May be called from several threads. Raises OSError."""
        line = line_of(entry)
        written = os.write(self._descriptor, line)
        if written < len(line):  # the disk is full: the rest raises, and the torn line is the last one
            os.write(self._descriptor, line[written:])

    def close(self) -> None:
        """Release the file."""
        os.close(self._descriptor)

    def __enter__(self) -> LineLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def line_of(entry: Entry) -> bytes:
    """One entry as a line."""
    return json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def read_log(path: Path) -> list[Entry]:
    """Whole entries of a file that nobody needs to have closed; none where it does not exist. Raises LineLogError,
    OSError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return parse_lines(data, str(path))


def parse_lines(data: bytes, name: str) -> list[Entry]:
    """Entries of a file's bytes; a torn last line is left out. Raises LineLogError for another line that is none."""
    entries = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):  # no line end after it
                break
            entry = None
        if not isinstance(entry, dict):
            raise LineLogError(f"{name}: line {number} is no JSON object; is it the right file?")
        entries.append(entry)
    return entries


def _locked(path: Path) -> int:
    """A descriptor that appends to `path` and holds its lock."""
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here, there = os.fstat(descriptor), os.stat(path)
        except BlockingIOError:
            os.close(descriptor)
            raise LineLogError(f"{path}: another process writes to it; wait for it, or name another file") from None
        except FileNotFoundError:
            os.close(descriptor)
            continue
        except BaseException:
            os.close(descriptor)
            raise
        if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
            return descriptor
        os.close(descriptor)  # replaced between opening and locking
