"""Which entries need which: a block needs its parent, a snapshot the block at whose end it was taken (L4).

A suffix is no use without its prefix, but a FIFO would let the prefix go first, since it came first. So when a prefix's
turn comes, what hangs on it leaves before it, deepest first.
"""

from __future__ import annotations

from headrace.kvcache.keys import Key


class Lineage:
    """Children of each key among the entries that are there. The parent itself need not be."""

    def __init__(self) -> None:
        self._parent: dict[Key, Key] = {}
        self._children: dict[Key, dict[Key, None]] = {}

    def add(self, key: Key, parent: Key) -> None:
        self._parent[key] = parent
        self._children.setdefault(parent, {})[key] = None

    def remove(self, key: Key) -> None:
        parent = self._parent.pop(key)
        siblings = self._children[parent]
        del siblings[key]
        if not siblings:
            del self._children[parent]

    def has_children(self, key: Key) -> bool:
        return key in self._children

    def family(self, key: Key) -> list[Key]:
        """`key`, then everything that needs it, each after what it needs: taken from the end, suffixes go first."""
        found = [key]
        for each in found:  # grows while it is walked
            found.extend(self._children.get(each, ()))
        return found

    def __len__(self) -> int:
        return len(self._parent)

    def __contains__(self, key: object) -> bool:
        return key in self._parent

    def clear(self) -> None:
        self._parent.clear()
        self._children.clear()
