"""Bars of commands that take long: on standard error, so that results may go to a pipe; silent where nobody watches."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn


def progress_bar(*more: ProgressColumn) -> Progress:
    """A bar for each task: description, done of total, `more`, time."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *more,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
