"""L6, L13: work of unknown length in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engine.isolated import CannotStart, Isolated, Refused, TimeUp

LONG = 120.0
HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


@pytest.fixture
def process() -> Iterator[Isolated]:
    made = Isolated("isolated_child", memory_bytes=1 << 27, environment=HERE)
    yield made
    made.close()


def test_answers_and_refusals_come_back(process: Isolated) -> None:
    """One process serves call after call, large frames too; what is printed is no frame."""
    large = b"x" * (3 << 20)
    first = process.call(large, limit_s=LONG, set_up=lambda: b"up")
    assert first.startswith(b"up" + large)
    with pytest.raises(Refused, match="no"):
        process.call(b"refuse", limit_s=LONG)
    assert process.call(b"print", limit_s=LONG)[7:] == first[len(large) + 2 :]


def test_a_killed_one_is_followed_by_another(process: Isolated) -> None:
    """Time, memory and crashes end or refuse the work; the next call is served."""
    before = process.call(b"", limit_s=LONG)
    with pytest.raises(TimeUp):
        process.call(b"sleep", limit_s=0.2)
    after = process.call(b"", limit_s=LONG)
    assert after != before
    with pytest.raises(Refused, match="too large"):
        process.call(b"grow", limit_s=LONG)
    assert process.call(b"", limit_s=LONG) == after
    with pytest.raises(Refused, match="more than the process"):
        process.call(b"die", limit_s=LONG)
    assert process.call(b"", limit_s=LONG) != after


def test_a_module_that_does_not_start_is_told() -> None:
    """Not taken for a refusal of the work."""
    with pytest.raises(CannotStart, match="no_such_module"):
        Isolated("no_such_module", memory_bytes=1).call(b"", limit_s=LONG)
