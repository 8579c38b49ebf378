"""Declarations against a compiler's view of them, and what a wrong library is told."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from pathlib import Path

import pytest

from headrace.kvcache.store.threefs import abi
from headrace.kvcache.store.threefs.abi import Cqe, Ior, Iov, Library, UsrbioUnavailable
from tests.kvcache.store.threefs.usrbio_double import SOURCES, Double


def test_structures_have_the_sizes_and_offsets_that_the_compiler_asserted(double_path: Path) -> None:
    """double_path exists only if abi.h's static assertions hold; the same numbers must hold here."""
    text = (SOURCES / "abi.h").read_text()
    structures = {"hf3fs_iov": Iov, "hf3fs_ior": Ior, "hf3fs_cqe": Cqe}
    sizes = re.findall(r"sizeof\((\w+)\) == (\d+)", text)
    offsets = re.findall(r"offsetof\((\w+), (\w+)\) == (\d+)", text)
    assert len(sizes) == 3
    assert len(offsets) == 5
    for name, size in sizes:
        assert ctypes.sizeof(structures[name]) == int(size), name
    for name, member, offset in offsets:
        assert getattr(structures[name], member).offset == int(offset), (name, member)


def test_a_library_that_is_not_there_says_what_to_build(tmp_path: Path) -> None:
    with pytest.raises(UsrbioUnavailable, match="hf3fs_api_shared"):
        Library(str(tmp_path / "nothing.so"))


def test_another_library_is_refused() -> None:
    other = ctypes.util.find_library("m")
    assert other is not None
    with pytest.raises(UsrbioUnavailable, match="hf3fs_iovcreate"):
        Library(other)


def test_rings_always_forbid_holes(double: Double, mount: Path) -> None:
    """L3: without the flag a missing chunk reads as zeros."""
    library = Library(str(double.path))
    for read in (True, False):
        ring = library.create_ring(str(mount), 4, read=read)
        assert ring.flags == abi.FORBID_READ_HOLES
        assert ring.for_read is read
        library.destroy_ring(ring)


def test_the_mount_point_is_the_ancestor_with_the_virtual_directory(double: Double, mount: Path) -> None:
    library = Library(str(double.path))
    (mount / "a" / "b").mkdir(parents=True)
    assert library.mount_point(str(mount / "a" / "b")) == str(mount)
    assert library.mount_point(str(mount.parent)) is None
