"""A plan of placement put in place by epochs: all ranks of a replica switch at one step boundary, or none does.

New weights land in spare slots, beside those that serve. Between two steps all ranks exchange the newest epoch that
each could serve, along with the token counts that they exchange anyway, and go on with the least: so the first boundary
at which every rank is ready is the switch, on every rank, without anybody's naming a step that the word might reach too
late. The old slots are freed after the step that first ran with the new map. Until that boundary whatever goes wrong on
one rank aborts the epoch for all, since a rank that has withdrawn keeps the least below it; after it an abort comes too
late and changes nothing.

`RankEpoch` is a rank's side, owned by the thread that runs its steps. `Epoch` is the side of whoever carries out the
plan: its states are values and its events are data, so that one who recorded every event and died is replaced by
replaying the record (L20). No clock here: a time comes with the event that tells it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace


class EpochError(ValueError):
    """What is asked or told cannot be in this state; the message says what the state is."""


@dataclass(frozen=True, slots=True)
class RankEpoch:
    """What one rank serves and prepares. Every method returns the next state."""

    active: int = 0
    """The epoch whose map its steps run with."""
    loading: int | None = None
    """Its weights are arriving in spare slots."""
    ready: int | None = None
    """Its weights lie in spare slots, verified (L3)."""
    retiring: int | None = None
    """Its slots are no longer named by the map, and not free yet: the step that switched may still run."""
    offered: bool = False
    """Told the others what it could serve, and has not heard the least: it is bound by what it said."""
    withdrawn: int = 0
    """The newest epoch whose abort it has heard of: an order to load it comes late."""

    @property
    def spare(self) -> bool:
        """Its spare slots are free."""
        return self.loading is None and self.ready is None and self.retiring is None

    def load(self, epoch: int) -> RankEpoch:
        """Begin to fill spare slots. An order that was heard before, or is older than what serves or was withdrawn,
        changes nothing. Raises EpochError while the slots are in use for another epoch."""
        if epoch <= max(self.active, self.withdrawn) or epoch in (self.loading, self.ready):
            return self
        if not self.spare:
            raise EpochError(f"epoch {epoch} needs the spare slots, which epoch {self._spare_of()} has")
        return replace(self, loading=epoch)

    def loaded(self, epoch: int) -> RankEpoch:
        """All its weights have landed. Of an epoch that was aborted meanwhile: nothing happens."""
        return replace(self, loading=None, ready=epoch) if self.loading == epoch else self

    def abort(self, epoch: int) -> RankEpoch:
        """Withdraw, unless it serves already. While it is bound by what it offered, the boundary decides first."""
        if epoch <= self.active:
            return self
        heard = replace(self, withdrawn=max(epoch, self.withdrawn))
        return heard if self.offered else heard._given_up()

    def offer(self) -> tuple[RankEpoch, int]:
        """At a step boundary: the newest epoch it could serve, for the exchange."""
        return replace(self, offered=True), self.active if self.ready is None else self.ready

    def cross(self, least: int) -> RankEpoch:
        """The exchange's result: the next step runs with the map of `active`. Raises EpochError for a result that
        cannot be with what this rank offered."""
        if not self.offered or least < self.active or least > max(self.active, self.ready or 0):
            raise EpochError(
                f"epoch {least} cannot be the least of an exchange with this rank, which is at {self.active}"
            )
        crossed = replace(self, offered=False)
        if least > self.active:
            return replace(crossed, active=least, ready=None, retiring=self.active)
        return crossed._given_up()

    def free(self) -> RankEpoch:
        """The first step with the new map is over: the old slots are the spare ones now."""
        return replace(self, retiring=None)

    def _given_up(self) -> RankEpoch:
        """Without what has been withdrawn."""
        return replace(
            self,
            loading=None if (self.loading or 0) <= self.withdrawn else self.loading,
            ready=None if (self.ready or 0) <= self.withdrawn else self.ready,
        )

    def _spare_of(self) -> int | None:
        return next((epoch for epoch in (self.loading, self.ready, self.retiring) if epoch is not None), None)


class Phase(enum.Enum):
    """Where an epoch is.

    PLANNED ─▶ LOADING ─▶ SWITCHED ─▶ DONE
                  └─▶ ABORTING ─▶ ABORTED      (and back to SWITCHED, where the abort came too late)
    """

    PLANNED = "planned"
    LOADING = "loading"
    SWITCHED = "switched"
    DONE = "done"
    ABORTING = "aborting"
    ABORTED = "aborted"

    @property
    def over(self) -> bool:
        """Nothing more happens, and no slot is held for it."""
        return self in (Phase.DONE, Phase.ABORTED)


@dataclass(frozen=True, slots=True)
class Begun:
    """The ranks were told to load; all must serve it by `deadline`."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank is ready."""

    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank cannot take part."""

    epoch: int
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes; nothing else tells that a rank is late (L6, L9)."""

    at: float


@dataclass(frozen=True, slots=True)
class Switched:
    """A rank runs `step` as the first with the new map."""

    epoch: int
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """A rank's spare slots are free again: the old ones after a switch, the new ones after an abort."""

    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank is gone, and the replica with it: its ranks step together."""

    rank: int


Event = Begun | Loaded | Failed | Tick | Switched | Cleared | Lost


@dataclass(frozen=True, slots=True)
class Epoch:
    """Carrying out one plan. LOADING: the ranks are to load; ABORTING: to withdraw."""

    number: int
    """Counts up over the replica's life; 0 is what it began with. Events of others are late and change nothing."""
    ranks: int
    phase: Phase = Phase.PLANNED
    deadline: float = 0.0
    loaded: frozenset[int] = frozenset()
    switched_at: int | None = None
    """The step that ran first with the new map, the same on all ranks."""
    cleared: frozenset[int] = frozenset()
    reason: str = ""
    """Why it was aborted, if it was."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.number < 1:
            raise EpochError("an epoch has a number from 1 on and at least one rank")

    @property
    def unanswered(self) -> tuple[int, ...]:
        """Ranks that owe the next answer: tell them again."""
        answered = self.loaded if self.phase is Phase.LOADING else self.cleared
        return () if self.phase.over else tuple(rank for rank in range(self.ranks) if rank not in answered)


def advance(epoch: Epoch, event: Event) -> Epoch:
    """The next state. Repeated events change nothing. Raises EpochError for what cannot be."""
    match event:
        case Begun():
            if epoch.phase is not Phase.PLANNED:
                raise EpochError(f"epoch {epoch.number} is {epoch.phase.value}; only a planned one begins")
            return replace(epoch, phase=Phase.LOADING, deadline=event.deadline)
        case Tick():
            if epoch.phase is Phase.LOADING and event.at > epoch.deadline:
                late = ", ".join(map(str, epoch.unanswered)) or "none"
                return _abort(epoch, f"not switched in time; ranks not ready: {late}")
            return epoch
        case Lost():
            gone = replace(epoch, phase=Phase.ABORTED, reason=f"rank {event.rank} is gone, and the replica with it")
            return epoch if epoch.phase.over else gone
    if event.epoch != epoch.number:
        return epoch
    if not 0 <= event.rank < epoch.ranks:
        raise EpochError(f"rank {event.rank} is none of the {epoch.ranks} of epoch {epoch.number}")
    return _told(epoch, event)


def replay(epoch: Epoch, events: Iterable[Event]) -> Epoch:
    """The state after a record of events: where a new owner of the plan goes on (L20)."""
    for event in events:
        epoch = advance(epoch, event)
    return epoch


def _told(epoch: Epoch, event: Loaded | Failed | Switched | Cleared) -> Epoch:
    """What a rank says."""
    match event:
        case Loaded():
            return replace(epoch, loaded=epoch.loaded | {event.rank}) if epoch.phase is Phase.LOADING else epoch
        case Failed():
            return _abort(epoch, f"rank {event.rank}: {event.reason}") if epoch.phase is Phase.LOADING else epoch
        case Switched():
            if epoch.switched_at is not None and event.step != epoch.switched_at:
                raise EpochError(f"rank {event.rank} switched at step {event.step}, others at {epoch.switched_at}")
            if epoch.phase in (Phase.LOADING, Phase.ABORTING) and not epoch.cleared:
                return replace(epoch, phase=Phase.SWITCHED, switched_at=event.step, reason="")
            if epoch.switched_at is None:
                raise EpochError(f"rank {event.rank} switched while epoch {epoch.number} is {epoch.phase.value}")
            return epoch
        case Cleared():
            if epoch.phase not in (Phase.SWITCHED, Phase.ABORTING) and not epoch.phase.over:
                raise EpochError(f"rank {event.rank} cleared while epoch {epoch.number} is {epoch.phase.value}")
            cleared = epoch.cleared | {event.rank}
            if epoch.phase.over or len(cleared) < epoch.ranks:
                return replace(epoch, cleared=cleared)
            over = Phase.DONE if epoch.phase is Phase.SWITCHED else Phase.ABORTED
            return replace(epoch, cleared=cleared, phase=over)


def _abort(epoch: Epoch, reason: str) -> Epoch:
    return replace(epoch, phase=Phase.ABORTING, reason=reason)
