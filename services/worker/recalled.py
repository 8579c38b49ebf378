"""What was taken back, perhaps before it arrived."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")
MAX_RECALLED: Final = 4096


class Recalled(Generic[Key]):
    """Names of what was taken back, the last MAX_RECALLED: a call of theirs that arrives late is refused."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        """It is taken back."""
        self._keys[key] = None
        while len(self._keys) > MAX_RECALLED:
            self._keys.popitem(last=False)
