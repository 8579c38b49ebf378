"""Conservation (L11): accepted = live + finished + cancelled + deadline + failed, at every instant.

What is in flight is a set, and every count of it is the set's size. There is no gauge that one path increments and
another forgets to decrement. What is turned away with an error has arrived and was never accepted; what is in flight
counts as accepted until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final, Generic, TypeVar

from headrace.services.runtime.errors import (
    READER,
    Aborted,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NeverFits,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)

T = TypeVar("T", bound=Hashable)


class Outcome(StrEnum):
    """How something ended. The last three were turned away: nothing of them was begun for the caller."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """By the caller, who left, reads too slowly, or goes on elsewhere."""
    DEADLINE = "deadline"
    FAILED = "failed"
    REFUSED = "refused"
    """Overload, or a limit of the caller: later is better."""
    INVALID = "invalid"
    """Wrong in itself, or not for this caller."""
    UNAVAILABLE = "unavailable"
    """Nobody here can serve it now: elsewhere, or later, is better."""


TURNED_AWAY: Final = (Outcome.REFUSED, Outcome.INVALID, Outcome.UNAVAILABLE)
_MEANS: Final[tuple[tuple[tuple[type[BaseException], ...], Outcome], ...]] = (
    ((asyncio.CancelledError, GeneratorExit, Cancelled, Aborted), Outcome.CANCELLED),
    ((DeadlineExceeded,), Outcome.DEADLINE),
    ((ResourceExhausted,), Outcome.REFUSED),
    ((Unavailable,), Outcome.UNAVAILABLE),
    (
        (InvalidArgument, Unimplemented, NotFound, NeverFits, PermissionDenied, Unauthenticated),
        Outcome.INVALID,
    ),
)


def outcome_of(error: BaseException) -> Outcome:
    """How something ended of which nothing was begun, by what it raised."""
    if isinstance(error, ResourceExhausted) and error.field == READER:
        return Outcome.CANCELLED
    return next((outcome for kinds, outcome in _MEANS if isinstance(error, kinds)), Outcome.FAILED)


class ConservationError(AssertionError):
    """A thing entered twice, left twice or never entered, or the books do not balance: a bug in the caller."""


class LiveSet(Generic[T]):
    """The things of one kind that are in flight. Used from one thread; sizes may be read from any."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._live: set[T] = set()
        self._arrived = 0
        self._ended: dict[Outcome, int] = dict.fromkeys(Outcome, 0)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: T) -> bool:
        return item in self._live

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._live))

    @property
    def arrived(self) -> int:
        """How many ever entered, or were turned away before that."""
        return self._arrived

    @property
    def accepted(self) -> int:
        """Those of them that were not turned away."""
        return self._arrived - sum(self._ended[outcome] for outcome in TURNED_AWAY)

    def ended(self, outcome: Outcome) -> int:
        """How many left with `outcome`."""
        return self._ended[outcome]

    def enter(self, item: T) -> None:
        """Accept `item`; raises ConservationError when it is already in flight."""
        if item in self._live:
            raise ConservationError(f"{self.name}: {item!r} is already in flight")
        self._live.add(item)
        self._arrived += 1

    def leave(self, item: T, outcome: Outcome) -> None:
        """End `item`, exactly once; raises ConservationError when it is not in flight."""
        if item not in self._live:
            raise ConservationError(f"{self.name}: {item!r} is not in flight")
        self._live.remove(item)
        self._ended[outcome] += 1

    @contextmanager
    def within(self, item: T) -> Iterator[Ending]:
        """Hold `item` in flight for the block. It ends as the block says, by default FINISHED, or when the block raises
        as `outcome_of` has it.
        """
        self.enter(item)
        ending = Ending()
        try:
            yield ending
        except BaseException as error:
            if ending.outcome is Outcome.FINISHED:
                ending.outcome = outcome_of(error)
            raise
        finally:
            self.leave(item, ending.outcome)

    @contextmanager
    def at_door(self) -> Iterator[None]:
        """Before a thing is known by name: where the block raises, it has arrived and ended by that."""
        try:
            yield
        except BaseException as error:
            self._arrived += 1
            self._ended[outcome_of(error)] += 1
            raise

    def check(self) -> None:
        """Raise ConservationError unless the books balance."""
        ended = sum(self._ended.values())
        if self._arrived != len(self._live) + ended:
            raise ConservationError(f"{self.name}: {self._arrived} arrived ≠ {len(self._live)} live + {ended} ended")


class Ending:
    """What `LiveSet.within` records when its block ends."""

    def __init__(self) -> None:
        self.outcome = Outcome.FINISHED
