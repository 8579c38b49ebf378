"""A priority queue from which entries can be taken out of the middle."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)
SLACK = 16


class LazyHeap(Generic[ItemT]):
    """Items by key, the smallest first; O(log n) amortised per change.

    What was taken out stays in the heap as a husk until it comes up, or until husks outnumber the rest: then the heap
    is rebuilt, so that a client that comes and goes behind a long wait cannot grow it.
    """

    def __init__(self) -> None:
        self._keys: dict[ItemT, tuple[Any, int]] = {}
        self._heap: list[tuple[Any, int, ItemT]] = []
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item: ItemT) -> bool:
        return item in self._keys

    @property
    def husks(self) -> int:
        """Entries of the heap that stand for nothing any more."""
        return len(self._heap) - len(self._keys)

    def push(self, item: ItemT, key: Any) -> None:
        """Add an item, or give it another key. Items of equal keys come out in the order of their pushes."""
        current = self._keys.get(item)
        if current is not None and current[0] == key:
            return
        self._pushes += 1
        self._keys[item] = key, self._pushes
        heapq.heappush(self._heap, (key, self._pushes, item))
        self._tidy()

    def discard(self, item: ItemT) -> None:
        """Take an item out, if it is in."""
        if self._keys.pop(item, None) is not None:
            self._tidy()

    def peek(self) -> tuple[Any, ItemT]:
        """The smallest key and its item. Raises IndexError when empty."""
        while self._keys.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        key, _, item = self._heap[0]
        return key, item

    def pop(self) -> tuple[Any, ItemT]:
        """Take out the smallest. Raises IndexError when empty."""
        key, item = self.peek()
        heapq.heappop(self._heap)
        del self._keys[item]
        return key, item

    def _tidy(self) -> None:
        if self.husks > len(self._keys) + SLACK:
            self._heap = [(key, push, item) for item, (key, push) in self._keys.items()]
            heapq.heapify(self._heap)
