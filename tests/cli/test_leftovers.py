"""What is left in shared memory: of processes that are gone, not of others that run."""

from __future__ import annotations

import mmap
import os
import uuid

import pytest

from headrace.cli import leftovers
from headrace.cli.leftovers import SHARED, left_behind, shared_memory


def test_a_file_is_left_once_nobody_maps_it() -> None:
    before = shared_memory()
    name = f"headrace-test-{uuid.uuid4().hex}"
    path = SHARED / name
    path.write_bytes(bytes(4096))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            assert name in shared_memory() - before
            assert name not in left_behind(before), "somebody who lives has it"
        assert name in left_behind(before)
        assert name not in left_behind(before | {name}), "it was there before"
    finally:
        os.unlink(path)
    assert name not in left_behind(before)


def test_a_file_that_goes_with_its_owner_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had it ends while all processes are looked through: it is mapped no more, and is there no more."""
    before = shared_memory()
    path = SHARED / f"headrace-test-{uuid.uuid4().hex}"
    path.write_bytes(bytes(4096))

    def mapped() -> set[str]:
        path.unlink()
        return set()

    monkeypatch.setattr(leftovers, "_mapped", mapped)
    assert path.name not in left_behind(before)
