"""What is wrong with a data set or a run folder."""

from __future__ import annotations


class EvalError(ValueError):
    """The message names the file, and what to do."""
