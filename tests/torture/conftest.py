"""How long to torture, and the counts at the end.

`./build.sh torture` sets HEADRACE_TORTURE=full: the numbers that issue 3 asks for. Otherwise a short form runs.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import pytest


@dataclass
class Tally:
    """What was done to stores, and what came of it."""

    lines: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, subject: str, **counts: int) -> None:
        self.lines.setdefault(subject, Counter()).update(counts)


_TALLY = pytest.StashKey[Tally]()


def is_full() -> bool:
    """Whether the full numbers are asked for."""
    return os.environ.get("HEADRACE_TORTURE") == "full"


def rounds(full: int, short: int) -> int:
    """How many of something to do."""
    return full if is_full() else short


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Counts that are printed when all is done."""
    return request.config.stash.setdefault(_TALLY, Tally())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(_TALLY, None)
    if found is None:
        return
    terminalreporter.section("torture: full" if is_full() else "torture: short form")
    for subject, counts in sorted(found.lines.items()):
        told = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())
        terminalreporter.write_line(f"{subject}: {told}")
