"""Exit statuses, and the one exception that becomes a line on standard error and one of them."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Documented in docs/cli.md."""

    DONE = 0
    FAILED = 1
    """Something broke: a child died, a server has a defect, data did not match."""
    USAGE = 2
    """The command, a setting, a file or the request is wrong; change it before repeating."""
    UNREACHABLE = 3
    """Nobody answers, or nobody can serve this now."""
    OVERLOADED = 4
    """Refused for overload; the message says when to try again."""
    DEADLINE = 5
    """The deadline passed."""
    UNHEALTHY = 6
    """`status`: a replica is not ready, or an integrity check found something; `cache`: a replica did not do its part,
    or there was nothing to pin."""
    INTERRUPTED = 130
    """Ctrl-C."""


class CliError(Exception):
    """An error that the user can act on: one line that says what to do next, no traceback."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code
