"""What is known of the store: a bounded memory of recent answers, never a mirror of it (L24).

The store holds more than any router wants to know, and all its writers tell what they write. So keys are remembered as
present or absent for a while, the least recently used first to go; what is not remembered is asked of the store's
index, by the owner of this object and in one call. Both kinds of knowledge age: a present key may expire in the store
without a word, an absent one may be written by somebody whom this router does not hear.

Time is an argument. For one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.kvcache.keys import Key
from headrace.router.index.base import StorePrefix

_KEPT_BYTES: Final = 16
"""Of a key, as in the index: a wrong match costs a hint."""
ENTRY_BYTES: Final = 230
"""Of memory, measured, for dimensioning."""


@dataclass(frozen=True, slots=True)
class StoreQuestion:
    """What has to be asked before a prompt's prefix in the store is known; empty: nothing."""

    blocks: tuple[int, ...] = ()
    """Positions of blocks whose presence is not known."""
    snapshots: tuple[int, ...] = ()
    """Numbers of blocks behind which a snapshot may lie."""

    def __bool__(self) -> bool:
        return bool(self.blocks or self.snapshots)


class StoreView:
    """Recently known keys."""

    def __init__(self, most_keys: int, present_s: float, absent_s: float) -> None:
        """How long an answer holds. Present ones live long in the store, and a wrong one costs a verified miss at
        prefill; an absent one costs the prefix, so it holds for a short while only."""
        if most_keys < 1 or present_s <= 0 or absent_s <= 0:
            raise ValueError(f"most_keys {most_keys}, present_s {present_s} and absent_s {absent_s} must be positive")
        self._most_keys = most_keys
        self._lives = {True: present_s, False: absent_s}
        self._known: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()
        """Whether it is there, and until when that holds; in order of use."""

    def __len__(self) -> int:
        return len(self._known)

    def known(self, key: Key, now: float) -> bool | None:
        """Whether the store has it; None: not known."""
        kept = key[:_KEPT_BYTES]
        found = self._known.get(kept)
        if found is None:
            return None
        if now >= found[1]:
            del self._known[kept]
            return None
        self._known.move_to_end(kept)
        return found[0]

    def learn(self, keys: Sequence[Key], present: Sequence[bool], now: float) -> None:
        """The index's answers, or what a writer says."""
        for key, there in zip(keys, present, strict=True):
            kept = key[:_KEPT_BYTES]
            self._known[kept] = (there, now + self._lives[there])
            self._known.move_to_end(kept)
        while len(self._known) > self._most_keys:
            self._known.popitem(last=False)

    def stored(self, keys: Sequence[Key], now: float) -> None:
        """A writer of the store says that they are durable."""
        self.learn(keys, [True] * len(keys), now)

    def removed(self, keys: Sequence[Key], now: float) -> None:
        """They are gone; of those that nobody asked for nothing is noted."""
        for key in keys:
            if key[:_KEPT_BYTES] in self._known:
                self.learn((key,), (False,), now)

    def forget(self) -> None:
        """Something was dropped whose keys are not told (a bucket, a namespace), or words of a writer were lost."""
        self._known.clear()

    # --- one prompt ------------------------------------------------------------------------------------------------

    def prefix(self, blocks: Sequence[Key], snapshots: Sequence[Key] | None, count: int, now: float) -> StorePrefix:
        """What is known for certain of the first `count` blocks."""
        leading = 0
        while leading < count and self.known(blocks[leading], now):
            leading += 1
        ends = (
            () if snapshots is None else (end for end in range(1, leading + 1) if self.known(snapshots[end - 1], now))
        )
        return StorePrefix(leading, frozenset(ends))

    def question(
        self, blocks: Sequence[Key], snapshots: Sequence[Key] | None, count: int, now: float, most: int
    ) -> StoreQuestion:
        """What to ask, at most `most` keys, so that `prefix` says all: unknown blocks before the first that is known to
        be absent, and snapshots behind blocks that may be there. The longest prefixes decide, so where there are too
        many keys the blocks come first and then snapshots from the end."""
        unknown: list[int] = []
        reach = count
        for position in range(count):
            there = self.known(blocks[position], now)
            if there is False:
                reach = position
                break
            if there is None:
                unknown.append(position)
        unknown = unknown[:most]
        if len(unknown) == most:
            reach = unknown[-1] + 1
        if snapshots is None:
            return StoreQuestion(tuple(unknown))
        ends = [end for end in range(reach, 0, -1) if self.known(snapshots[end - 1], now) is None]
        return StoreQuestion(tuple(unknown), tuple(ends[: most - len(unknown)]))

    def answered(
        self,
        blocks: Sequence[Key],
        snapshots: Sequence[Key] | None,
        question: StoreQuestion,
        present: Sequence[bool],
        now: float,
    ) -> None:
        """The answers, blocks first. Behind the first absent block nothing is noted: nobody can use it."""
        asked = len(question.blocks)
        there = list(present[:asked])
        reach = there.index(False) + 1 if False in there else asked
        self.learn([blocks[position] for position in question.blocks[:reach]], there[:reach], now)
        end = question.blocks[reach - 1] if reach and not there[reach - 1] else None
        if snapshots is None:
            return
        useful = [
            (snapshots[number - 1], has)
            for number, has in zip(question.snapshots, present[asked:], strict=True)
            if end is None or number <= end
        ]
        # From the end: the snapshots that decide are the freshest in memory.
        self.learn([key for key, _ in reversed(useful)], [has for _, has in reversed(useful)], now)
