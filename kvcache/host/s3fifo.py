"""S3-FIFO: which entry leaves when room is needed. From the description in Yang et al., "FIFO queues are all you need
for cache eviction", SOSP 2023 (section 4, algorithm 1), in bytes instead of objects.

Three queues: *small* (a share of the bytes) takes what is new; *main* takes what was used while in small, and what
comes back soon after it left; *ghost* remembers keys, without bytes, of what left small. Entries used once
pass through small and never push out main. A use only counts up to 3 in place; nothing moves until room is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from headrace.kvcache.keys import Key

SMALL_SHARE = 0.5
"""Of the bytes, for what is new. The paper's 0.1 suits web objects; the next turn of a conversation comes minutes
later, when a tenth of the tier has long been replaced (README.md, measured)."""
MAX_HITS = 3
PROMOTE_HITS = 1
"""Uses in small that carry an entry over to main: the paper's 2 asks for two further turns before anything is kept."""


@dataclass(eq=False, slots=True)
class _Entry:
    size: int
    hits: int = 0


class _Queue:
    """A FIFO with its bytes; oldest first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Key, _Entry] = OrderedDict()
        self.bytes = 0

    def push(self, key: Key, entry: _Entry) -> None:
        self.entries[key] = entry
        self.bytes += entry.size

    def pop(self, key: Key) -> _Entry:
        entry = self.entries.pop(key)
        self.bytes -= entry.size
        return entry

    def oldest(self) -> Key:
        return next(iter(self.entries))


class S3Fifo:
    """Order of eviction; knows keys and sizes. Not thread-safe: the tier's lock guards it."""

    def __init__(self, capacity_bytes: int) -> None:
        self._small_bytes = int(capacity_bytes * SMALL_SHARE)
        self._small, self._main = _Queue(), _Queue()
        self._ghost: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._small.entries) + len(self._main.entries)

    def __contains__(self, key: object) -> bool:
        return key in self._small.entries or key in self._main.entries

    @property
    def bytes(self) -> int:
        return self._small.bytes + self._main.bytes

    @property
    def ghosts(self) -> int:
        return len(self._ghost)

    def insert(self, key: Key, size: int) -> None:
        """A new entry; it must not be there."""
        queue = self._small
        if key in self._ghost:
            del self._ghost[key]
            queue = self._main
        queue.push(key, _Entry(size))

    def hit(self, key: Key) -> None:
        """An entry was used."""
        entry = self._small.entries.get(key) or self._main.entries[key]
        entry.hits = min(entry.hits + 1, MAX_HITS)

    def hits(self, key: Key) -> int:
        """Uses that still count."""
        return (self._small.entries.get(key) or self._main.entries[key]).hits

    def candidate(self, may_leave: Callable[[Key], bool]) -> Key | None:
        """The entry whose turn it is to leave, still in its place; None when nothing may. Entries that may not leave
        (pinned) go round again, as if just inserted into their queue."""
        small, main = self._small, self._main
        # Entries passed over since something else happened in the queue: when that is all of them, it has none to give.
        passed_small = passed_main = 0
        while True:
            small_gives, main_gives = passed_small < len(small.entries), passed_main < len(main.entries)
            if small_gives and (small.bytes > self._small_bytes or not main_gives):
                key = small.oldest()
                entry = small.entries[key]
                if entry.hits >= PROMOTE_HITS:
                    small.pop(key)
                    entry.hits = 0
                    main.push(key, entry)
                    passed_small = passed_main = 0
                elif may_leave(key):
                    return key
                else:
                    small.push(key, small.pop(key))
                    passed_small += 1
            elif main_gives:
                key = main.oldest()
                entry = main.entries[key]
                if entry.hits > 0:
                    entry.hits -= 1
                    passed_main = 0
                elif may_leave(key):
                    return key
                else:
                    passed_main += 1
                main.push(key, main.pop(key))
            else:
                return None

    def evict(self, key: Key) -> None:
        """The entry leaves for want of room; small's are remembered, as many as there are entries."""
        if key in self._small.entries:
            self._small.pop(key)
            self._ghost[key] = None
            while len(self._ghost) > max(1, len(self)):
                self._ghost.popitem(last=False)
        else:
            self._main.pop(key)

    def remove(self, key: Key) -> None:
        """The entry is dropped for another reason, and not remembered."""
        (self._small if key in self._small.entries else self._main).pop(key)

    def clear(self) -> None:
        """Forget everything, ghosts too."""
        self._small, self._main = _Queue(), _Queue()
        self._ghost.clear()
