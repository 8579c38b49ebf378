"""Progress of a conversion: what the converter says, and a rich bar that shows it."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

import rich.progress
from rich.console import Console


class Progress(Protocol):
    def stage(self, name: str, total: int | None) -> None:
        """A new stage begins; ``total`` bytes, or None when its length is unknown."""
        ...

    def advance(self, amount: int) -> None:
        """Bytes done since the last call."""
        ...


class Silent:
    """No output."""

    def stage(self, name: str, total: int | None) -> None: ...

    def advance(self, amount: int) -> None: ...


class RichProgress:
    """One bar per stage, on a console. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._bars = rich.progress.Progress(
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            rich.progress.TimeElapsedColumn(),
            console=console,
        )
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        self._bars.stop()

    def stage(self, name: str, total: int | None) -> None:
        self._finish()
        self._task = self._bars.add_task(name, total=total)

    def advance(self, amount: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, amount)

    def _finish(self) -> None:
        if self._task is not None:
            done = self._bars.tasks[self._task].completed
            self._bars.update(self._task, total=max(done, 1), completed=max(done, 1))
