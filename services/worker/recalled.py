"""What was taken back, perhaps before it arrived."""

from __future__ import annotations

from typing import Final

from headrace.kvcache.last_keys import KeyT, LastKeys

MAX_RECALLED: Final = 4096


class Recalled(LastKeys[KeyT]):
    """Names of what was taken back, the last MAX_RECALLED: a call of theirs that arrives late is refused."""

    def __init__(self) -> None:
        super().__init__(MAX_RECALLED)
