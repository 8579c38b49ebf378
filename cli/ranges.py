"""Numbers of flags, which may also be `nan`, `inf` or 1e300."""

from __future__ import annotations

from headrace.cli.exits import CliError

MOST_TIMEOUT_S = 1e6
"""Twelve days."""


def require_within(flag: str, value: float, least: float, most: float) -> None:
    """Raises CliError for a value outside of [least, most], and for one that is no number."""
    if not least <= value <= most:
        raise CliError(f"{flag} {value:g} is not from {least:g} to {most:g}")
