"""Progress of long benchmarks on stderr (stdout carries the result alone): bars on a terminal, else a line every half
minute and one at the end of each phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_S = 30.0
"""Where no terminal is."""
Advance = Callable[[], None]
"""Called when one more of a phase's items is done; from any thread."""


class Phases:
    """Use as a context manager around the whole run."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    @contextmanager
    def phase(self, label: str, total: int = 1) -> Iterator[Advance]:
        """One bar; complete when the block ends well."""
        start = told = time.monotonic()
        task = self._bars.add_task(label, total=total)
        done = 0

        def advance() -> None:
            nonlocal done, told
            done += 1
            self._bars.advance(task)
            now = time.monotonic()
            if not self._console.is_terminal and now - told >= LINE_S:
                told = now
                self._console.print(f"{label}: {done} of {total} after {now - start:.0f} s", highlight=False)

        yield advance
        self._bars.update(task, completed=total)
        if not self._console.is_terminal:
            self._console.print(f"{label}: {total} in {time.monotonic() - start:.1f} s", highlight=False)
