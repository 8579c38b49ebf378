"""Times in messages: milliseconds that a caller chose, as seconds that timers and clocks can take."""

from __future__ import annotations

from typing import Final

from headrace.services.runtime.errors import InvalidArgument

LONGEST_S: Final = 7 * 24 * 3600
"""A week. No request lives so long, and what is added to it stays within every clock's range."""


def seconds(milliseconds: int, field: str) -> float:
    """Raises InvalidArgument, naming the field, for more than LONGEST_S."""
    if milliseconds > LONGEST_S * 1000:
        raise InvalidArgument(f"{milliseconds} ms; at most a week ({LONGEST_S * 1000} ms) is taken", field=field)
    return milliseconds / 1000
