"""Whole files: what readers find, who may read them, and what a failure leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.services.runtime.files import stamp_of, write_whole


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_is_written_whole_with_its_mode(tmp_path: Path, mode: int) -> None:
    """Over a former one of another mode, too."""
    path = tmp_path / "file"
    path.write_text("former")
    path.chmod(0o666)
    write_whole(path, b"new", mode, sync=True)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == mode & ~_umask()
    assert os.listdir(tmp_path) == ["file"]


def test_what_cannot_be_written_leaves_the_former_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", b"new", 0o600)
    assert os.listdir(tmp_path) == ["folder"]


def test_nobody_else_has_the_file_open_while_it_is_written(tmp_path: Path) -> None:
    """What somebody laid under the name of the unfinished file is not written to."""
    path = tmp_path / "key"
    laid = path.with_name(f".{path.name}.{os.getpid()}.partial")
    laid.touch(0o666)
    with laid.open() as spy:
        write_whole(path, b"secret", 0o600)
        assert spy.read() == ""
    assert path.stat().st_mode & 0o077 == 0


def test_the_stamp_tells_a_replacement_of_equal_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "file"
    stamps = set()
    for text in (b"one", b"two"):
        write_whole(path, text, 0o600)
        os.utime(path, (1, 1))
        stamps.add(stamp_of(path))
    assert len(stamps) == 2


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
