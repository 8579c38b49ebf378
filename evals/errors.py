"""What is wrong with a data set or a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.services.runtime.line_log import LineLogError


class EvalError(ValueError):
    """The message names the file, and what to do."""


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into EvalError."""
    try:
        yield
    except LineLogError as error:
        raise EvalError(str(error)) from error
    except OSError as error:
        raise EvalError(f"{path}: {error.strerror or error}") from error
