"""S3-FIFO against a plain twin of the paper's algorithm, and what it is chosen for."""

from __future__ import annotations

import random
from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvcache.host.s3fifo import MAX_HITS, PROMOTE_HITS, SMALL_SHARE, S3Fifo

CAPACITY = 1000


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Twin:
    """Lists of [key, size, hits], oldest first; everything is counted anew each time."""

    def __init__(self) -> None:
        self.small: list[list[int]] = []
        self.main: list[list[int]] = []
        self.ghost: list[int] = []

    def find(self, number: int) -> list[int]:
        return next(entry for entry in self.small + self.main if entry[0] == number)

    def insert(self, number: int, size: int) -> None:
        if number in self.ghost:
            self.ghost.remove(number)
            self.main.append([number, size, 0])
        else:
            self.small.append([number, size, 0])

    def hit(self, number: int) -> None:
        self.find(number)[2] = min(self.find(number)[2] + 1, MAX_HITS)

    def evict(self, pinned: set[int]) -> int | None:
        while True:
            small_gives = any(entry[0] not in pinned or entry[2] >= PROMOTE_HITS for entry in self.small)
            main_gives = any(entry[0] not in pinned or entry[2] > 0 for entry in self.main)
            over = sum(size for _, size, _ in self.small) > int(CAPACITY * SMALL_SHARE)
            if small_gives and (over or not main_gives):
                entry = self.small.pop(0)
                if entry[2] >= PROMOTE_HITS:
                    self.main.append([entry[0], entry[1], 0])
                elif entry[0] in pinned:
                    self.small.append(entry)
                else:
                    self.ghost.append(entry[0])
                    del self.ghost[: max(0, len(self.ghost) - max(1, len(self.main) + len(self.small)))]
                    return entry[0]
            elif main_gives:
                entry = self.main.pop(0)
                if entry[2] == 0 and entry[0] not in pinned:
                    return entry[0]
                self.main.append([entry[0], entry[1], max(0, entry[2] - 1)])
            else:
                return None


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pins=st.integers(0, 3))
def test_it_evicts_what_the_plain_twin_evicts(seed: int, pins: int) -> None:
    chooser = random.Random(seed)
    policy, twin = S3Fifo(CAPACITY), Twin()
    there: dict[int, int] = {}
    for _ in range(200):
        number = chooser.randrange(40)
        if number in there:
            policy.hit(key(number))
            twin.hit(number)
            continue
        size = chooser.choice([10, 10, 10, 120])
        while sum(there.values()) + size > CAPACITY // 2:
            pinned = set(chooser.sample(sorted(there), min(pins, len(there))))
            expected = twin.evict(pinned)
            unpinned = {key(each) for each in there if each not in pinned}
            victim = policy.candidate(unpinned.__contains__)
            assert victim == (None if expected is None else key(expected))
            if victim is None or expected is None:
                return
            policy.evict(victim)
            del there[expected]
        policy.insert(key(number), size)
        twin.insert(number, size)
        there[number] = size
    assert len(policy) == len(there)
    assert policy.bytes == sum(there.values())
    assert policy.ghosts == len(twin.ghost)


def _hit_ratio_of_s3fifo(trace: list[int], capacity: int) -> float:
    policy, hits = S3Fifo(capacity), 0
    for number in trace:
        if key(number) in policy:
            policy.hit(key(number))
            hits += 1
            continue
        while policy.bytes + 1 > capacity:
            victim = policy.candidate(lambda _: True)
            assert victim is not None
            policy.evict(victim)
        policy.insert(key(number), 1)
    return hits / len(trace)


def _hit_ratio_of_lru(trace: list[int], capacity: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number in trace:
        hits += number in held
        held[number] = None
        held.move_to_end(number)
        if len(held) > capacity:
            held.popitem(last=False)
    return hits / len(trace)


def test_what_is_seen_once_does_not_push_out_what_is_used() -> None:
    """A working set of conversations with long documents, each read once, in between: what LRU is bad at."""
    chooser = random.Random(1)
    trace: list[int] = []
    fresh = 1000
    for _ in range(300):
        trace += [chooser.randrange(60) for _ in range(40)]
        trace += range(fresh, fresh + 80)
        fresh += 80
    ours, lru = _hit_ratio_of_s3fifo(trace, 100), _hit_ratio_of_lru(trace, 100)
    assert ours > lru + 0.05, (ours, lru)


def test_what_comes_back_soon_after_it_left_goes_to_main() -> None:
    policy = S3Fifo(2)
    policy.insert(key(1), 1)
    victim = policy.candidate(lambda _: True)
    assert victim == key(1)
    policy.evict(victim)
    policy.insert(key(1), 1)
    policy.insert(key(2), 1)
    policy.insert(key(3), 1)
    assert policy.candidate(lambda _: True) == key(2)


def test_removed_is_not_remembered() -> None:
    policy = S3Fifo(10)
    policy.insert(key(1), 1)
    policy.remove(key(1))
    assert (len(policy), policy.ghosts, policy.bytes) == (0, 0, 0)
    assert policy.candidate(lambda _: True) is None
