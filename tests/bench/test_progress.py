"""bench._progress: a long benchmark says how far it is where no terminal shows bars."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench import _progress


def test_lines_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with (
        _progress.Phases(Console(file=out, force_terminal=False)) as progress,
        progress.phase("runs", 5) as advance,
    ):
        for _ in range(5):
            now[0] += 12.0
            advance()
    assert out.getvalue().splitlines() == ["runs: 3 of 5 after 36 s", "runs: 5 in 60.0 s"]
