"""What a simulated prefill rank has in its device pool, and the store that all share. Keys only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol


class BlockCache(Protocol):
    """The device cache of one rank."""

    def leading(self, keys: Sequence[bytes], limit: int) -> int:
        """How many leading blocks are there, at most `limit`; they count as used now."""
        ...

    def add(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """A prompt was computed. Returns (blocks that are new here, blocks that had to leave for them)."""
        ...

    def clear(self) -> None:
        """The rank has died."""
        ...

    def __len__(self) -> int: ...


class InfiniteCache:
    """Everything ever computed on the rank."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def leading(self, keys: Sequence[bytes], limit: int) -> int:
        held = self._keys
        for number, key in enumerate(keys[:limit]):
            if key not in held:
                return number
        return min(len(keys), limit)

    def add(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        new = [key for key in keys if key not in self._keys]
        self._keys.update(new)
        return new, []

    def clear(self) -> None:
        self._keys.clear()


class LruCache:
    """At most `capacity` blocks, least recently used first out; of one prompt the end before the beginning."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a cache of {capacity} blocks holds nothing; leave the capacity away for an infinite one")
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def leading(self, keys: Sequence[bytes], limit: int) -> int:
        held = self._keys
        count = 0
        for key in keys[:limit]:
            if key not in held:
                break
            count += 1
        for key in reversed(keys[:count]):
            held.move_to_end(key)
        return count

    def add(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        kept = keys[: self._capacity]
        new = [key for key in kept if key not in self._keys]
        for key in reversed(kept):
            self._keys[key] = None
            self._keys.move_to_end(key)
        gone = [self._keys.popitem(last=False)[0] for _ in range(len(self._keys) - self._capacity)]
        return new, gone

    def clear(self) -> None:
        self._keys.clear()


class SharedStore:
    """Everything that any rank computed, readable by all a while after; loads take time on the rank's link."""

    def __init__(self, tokens_per_s: float, delay_s: float) -> None:
        """`tokens_per_s`: what one rank loads. `delay_s`: from a block's computation to its being durable."""
        if tokens_per_s <= 0 or delay_s < 0:
            raise ValueError(f"a store loads more than {tokens_per_s} tokens/s, after at least 0 s")
        self.tokens_per_s = tokens_per_s
        self.delay_s = delay_s
        self._since: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def add(self, keys: Sequence[bytes], now: float) -> None:
        """Blocks were computed; those that it has are not written again."""
        for key in keys:
            self._since.setdefault(key, now + self.delay_s)

    def leading(self, keys: Sequence[bytes], limit: int, now: float) -> int:
        """How many leading blocks can be loaded now."""
        for number, key in enumerate(keys[:limit]):
            if self._since.get(key, now + 1.0) > now:
                return number
        return min(len(keys), limit)
