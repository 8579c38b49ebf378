"""Well-known policies over single blocks, as peers: they pay no segments, no hysteresis and no bytes.

Each holds at most `capacity` blocks. `lead` counts the leading blocks that are there; `use` then inserts or touches all
blocks of the request, suffix before prefix (so that LRU evicts leaves first).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Mapping, Sequence


class Peer(ABC):
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @property
    @abstractmethod
    def held(self) -> Container[int]: ...

    @abstractmethod
    def use(self, blocks: Sequence[int]) -> None: ...

    def lead(self, blocks: Sequence[int]) -> int:
        held = self.held
        return next((at for at, block in enumerate(blocks) if block not in held), len(blocks))


class LeafFirstLru(Peer):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._held: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> Container[int]:
        return self._held

    def use(self, blocks: Sequence[int]) -> None:
        held = self._held
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.capacity:
            held.popitem(last=False)


class Fifo(Peer):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._held: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> Container[int]:
        return self._held

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._held.setdefault(block, None)
        while len(self._held) > self.capacity:
            self._held.popitem(last=False)


class S3Fifo(Peer):
    """Yang et al., SOSP 2023: a small queue of a tenth, a main queue, and a ghost of what left the small one."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_capacity = max(capacity // 10, 1)
        self._main_capacity = capacity - self._small_capacity
        self._uses: dict[int, int] = {}
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghost: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> Container[int]:
        return self._uses

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block in self._uses:
                self._uses[block] = min(self._uses[block] + 1, 3)
                continue
            if len(self._uses) >= self.capacity:
                self._evict()
            self._uses[block] = 0
            if block in self._ghost:
                del self._ghost[block]
                self._main.append(block)
            else:
                self._small.append(block)

    def _evict(self) -> None:
        if len(self._small) >= self._small_capacity or not self._main:
            while self._small:
                block = self._small.popleft()
                if self._uses[block] > 1:
                    self._uses[block] = 0
                    self._main.append(block)
                    if len(self._main) > self._main_capacity:
                        self._evict_main()
                        return
                else:
                    del self._uses[block]
                    self._ghost[block] = None
                    if len(self._ghost) > self._main_capacity:
                        self._ghost.popitem(last=False)
                    return
        self._evict_main()

    def _evict_main(self) -> None:
        while self._main:
            block = self._main.popleft()
            if self._uses[block] > 0:
                self._uses[block] -= 1
                self._main.append(block)
            else:
                del self._uses[block]
                return


PEERS: Mapping[str, Callable[[int], Peer]] = {"leaf_first_lru": LeafFirstLru, "s3_fifo": S3Fifo, "fifo": Fifo}
