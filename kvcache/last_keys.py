"""The last keys that something happened to: a bounded memory of what is over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")


class LastKeys(Generic[KeyT]):
    """At most so many; whoever shares it between threads holds a lock of his own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: OrderedDict[KeyT, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[KeyT]:
        """The oldest first."""
        return iter(tuple(self._keys))

    def add(self, key: KeyT) -> None:
        """It is the last one now; the oldest of too many are forgotten."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)
