"""The queue of router/admission on the event loop: who waits here is woken, refused or told that it is too late.

    async with desk.admitted(ticket) as turn:      waits for its turn
        …no room at decode: await turn.again()     waits where it stood, for news of room
        …room is promised:  turn.placed()
        …prefill reported:  turn.correct(tokens)

Leaving the block in any way gives the place up (L10).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NoReturn

from headrace.router.admission import Admission, Cause, Changes, FirstTokens, NoPlace, Refused, Ticket
from headrace.router.balancers.base import Rejected
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import DeadlineExceeded, ResourceExhausted

ROOM_POLL_S = 0.25
"""Longest pause before decode is asked again for room while somebody waits for it: another router's requests may have
ended there, of which nobody tells this one."""

REMEMBERED = 256
"""First tokens that are remembered, of the last `RECENT_S` at most: whoever is refused for them leaves none behind, so
old ones must not count for ever."""
RECENT_S = 30.0


class Turn:
    """One request's place in the queue, and among those that run."""

    def __init__(self, desk: AdmissionDesk, ticket: Ticket) -> None:
        self._desk = desk
        self.ticket = ticket
        self._placed = False
        self._delivered = False
        self.called = asyncio.Event()
        self.called_at = 0.0
        self.refused: Refused | None = None

    async def wait(self) -> None:
        """Until it may run. Raises ResourceExhausted, or DeadlineExceeded when waiting on is in vain."""
        await self.called.wait()
        if self.refused is not None:
            self._desk.refuse(self.refused)

    async def again(self) -> None:
        """No decode rank had room: wait where it stood. Raises like `wait`."""
        self._placed = False
        self.called.clear()
        self._desk.no_room(self.ticket)
        await self.wait()

    def placed(self) -> None:
        """Decode has promised room."""
        if not self._placed:
            self._placed = True
            self._desk.placed(self.ticket)

    def correct(self, tokens: int) -> None:
        """What prefill really computed."""
        self._desk.correct(self.ticket, tokens)

    def delivered(self) -> None:
        """Tokens have come."""
        if not self._delivered:
            self._delivered = True
            self._desk.first_token(self)

    def foreseen(self, rejected: Rejected) -> NoReturn:
        """A balancer rejects it. Raises ResourceExhausted."""
        self._desk.foreseen(rejected)


class AdmissionDesk:
    """Belongs to the event loop's thread."""

    def __init__(
        self, admission: Admission, clock: Clock, waited: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """`waited` is told how long each request waited for its first turn."""
        self._admission = admission
        self._clock = clock
        self._waited = waited
        self._turns: dict[str, Turn] = {}
        self._alarm = asyncio.Event()
        self._armed: float | None = None
        """When `run` wakes by itself."""
        self._has_news = False
        self._first_tokens = FirstTokens(REMEMBERED, RECENT_S)
        self.rejected: Counter[Cause] = Counter()
        """Requests turned away since the start."""

    @property
    def running(self) -> int:
        return self._admission.running

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    @property
    def waiting_tokens(self) -> int:
        return self._admission.waiting_tokens

    def waiting_by_priority(self) -> dict[int, int]:
        return dict(self._admission.waiting_by_priority())

    @property
    def idle(self) -> bool:
        """Nothing of any request or tenant is left here (L11)."""
        return not self._turns and not self.running and not self.waiting and not self._admission.tenants()

    def fastest_s(self, tokens: int) -> float:
        """The shortest time from a turn to the first token among late requests that had no more to compute than
        `tokens`: this one will not do it in less. 0 where none is known."""
        return self._first_tokens.fastest_s(tokens, self._clock.monotonic())

    @asynccontextmanager
    async def admitted(self, ticket: Ticket) -> AsyncIterator[Turn]:
        """A place among the running requests, after a bounded wait (L12). Raises ResourceExhausted with a time to come
        back, or DeadlineExceeded as soon as its deadline cannot be met any more."""
        arrived = self._clock.monotonic()
        try:
            changes = self._admission.enter(ticket, arrived)
        except Refused as refused:
            self.refuse(refused)
        turn = self._turns[ticket.request] = Turn(self, ticket)
        try:
            self._apply(changes)
            await turn.wait()
            self._waited(self._clock.monotonic() - arrived)
            yield turn
        finally:
            del self._turns[ticket.request]
            self._apply(self._admission.leave(ticket.request, self._clock.monotonic()))

    async def run(self) -> None:
        """L9: ends what waits in vain and asks for room again, on its own clock. A background task of the process."""
        while True:
            self._alarm.clear()
            now = self._clock.monotonic()
            self._armed = self._due(now)
            try:
                async with asyncio.timeout(None if self._armed is None else max(0.0, self._armed - now)):
                    await self._alarm.wait()
            except TimeoutError:
                self._has_news = True
            now = self._clock.monotonic()
            self._apply(self._admission.expire(now))
            if self._has_news and self._admission.blocked:
                self._apply(self._admission.room(now))
            self._has_news = False

    def news(self) -> None:
        """Decode may have room: a request ended, a worker came, a report says so."""
        if self._admission.blocked:
            self._has_news = True
            self._alarm.set()

    # --- for turns ---------------------------------------------------------------------------------------------

    def no_room(self, ticket: Ticket) -> None:
        try:
            self._apply(self._admission.no_room(ticket.request, self._clock.monotonic()))
        except Refused as refused:
            self.refuse(refused)

    def placed(self, ticket: Ticket) -> None:
        self._apply(self._admission.placed(ticket.request, self._clock.monotonic()))

    def correct(self, ticket: Ticket, tokens: int) -> None:
        self._admission.correct(ticket.request, tokens)

    def first_token(self, turn: Turn) -> None:
        now = self._clock.monotonic()
        self._first_tokens.add(turn.ticket.tokens, now - turn.called_at, now)

    def foreseen(self, rejected: Rejected) -> NoReturn:
        self.refuse(self._admission.predicted(rejected.reason, rejected.retry_after_s))

    def refuse(self, refused: Refused) -> NoReturn:
        """Count a refusal, and raise it as what the client is told (L12)."""
        self.rejected[refused.cause] += 1
        if isinstance(refused, NoPlace):
            raise ResourceExhausted(str(refused), retry_after_s=refused.retry_after_s) from refused
        raise DeadlineExceeded(str(refused)) from refused

    # --- inside ------------------------------------------------------------------------------------------------

    def _apply(self, changes: Changes) -> None:
        for request, error in changes.ended:
            self._turns[request].refused = error
            self._turns[request].called.set()
        now = self._clock.monotonic()
        for request in changes.started:
            self._turns[request].called_at = now
            self._turns[request].called.set()
        due = self._due(now)
        if due is not None and (self._armed is None or due < self._armed):
            self._alarm.set()

    def _due(self, now: float) -> float | None:
        """When something has to be done though nothing happens; None: never."""
        due = self._admission.next_expiry()
        if not self._admission.blocked:
            return due
        return now + ROOM_POLL_S if due is None else min(due, now + ROOM_POLL_S)
