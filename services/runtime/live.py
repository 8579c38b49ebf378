"""Conservation (L11): accepted = live + finished + cancelled + deadline + failed, at every instant.

What is in flight is a set, and every count of it is the set's size. There is no gauge that one path increments and
another forgets to decrement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Outcome(StrEnum):
    """How something that was accepted ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


class ConservationError(AssertionError):
    """A thing entered twice, left twice or never entered, or the books do not balance: a bug in the caller."""


class LiveSet(Generic[T]):
    """The things of one kind that are in flight. Used from one thread; sizes may be read from any."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._live: set[T] = set()
        self._accepted = 0
        self._ended: dict[Outcome, int] = dict.fromkeys(Outcome, 0)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: T) -> bool:
        return item in self._live

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._live))

    @property
    def accepted(self) -> int:
        """How many ever entered."""
        return self._accepted

    def ended(self, outcome: Outcome) -> int:
        """How many left with `outcome`."""
        return self._ended[outcome]

    def enter(self, item: T) -> None:
        """Accept `item`; raises ConservationError when it is already in flight."""
        if item in self._live:
            raise ConservationError(f"{self.name}: {item!r} is already in flight")
        self._live.add(item)
        self._accepted += 1

    def leave(self, item: T, outcome: Outcome) -> None:
        """End `item`, exactly once; raises ConservationError when it is not in flight."""
        if item not in self._live:
            raise ConservationError(f"{self.name}: {item!r} is not in flight")
        self._live.remove(item)
        self._ended[outcome] += 1

    @contextmanager
    def within(self, item: T) -> Iterator[Ending]:
        """Hold `item` in flight for the block. It ends as the block says, by default FINISHED, or when
        the block raises FAILED (CANCELLED if its task was cancelled).
        """
        self.enter(item)
        ending = Ending()
        try:
            yield ending
        except asyncio.CancelledError:
            if ending.outcome is Outcome.FINISHED:
                ending.outcome = Outcome.CANCELLED
            raise
        except BaseException:
            if ending.outcome is Outcome.FINISHED:
                ending.outcome = Outcome.FAILED
            raise
        finally:
            self.leave(item, ending.outcome)

    def check(self) -> None:
        """Raise ConservationError unless the books balance."""
        ended = sum(self._ended.values())
        if self._accepted != len(self._live) + ended:
            raise ConservationError(f"{self.name}: {self._accepted} accepted ≠ {len(self._live)} live + {ended} ended")


class Ending:
    """What `LiveSet.within` records when its block ends."""

    def __init__(self) -> None:
        self.outcome = Outcome.FINISHED
