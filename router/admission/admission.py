"""The queue: strict priority over tiers, fair among tenants inside one, bounded in every direction.

A request runs, waits, or is refused at once with a time to come back; there is no other place where it can be. One that
was started and found no room at decode comes back to where it stood (`no_room`), and nobody behind it is tried before
there is news of room, so that what is large is not overtaken for ever by what is small. Then one is tried at a time,
and twice as many after each success: the queue does not storm a full cluster.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping

from headrace.router.admission.drain import DrainRate, ReturnTimes
from headrace.router.admission.heap import LazyHeap
from headrace.router.admission.terms import AdmissionLimits, Cause, Changes, NoPlace, Refused, Ticket, TooLate
from headrace.router.admission.tier import Record, Tier


class Admission:
    """One thread. Times are an argument, never earlier than the last one given. O(log n) per call."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._records: dict[str, Record] = {}
        self._tiers: dict[int, Tier] = {}
        self._priorities: list[int] = []
        """Of the tiers, lowest first."""
        self._ends: LazyHeap[str] = LazyHeap()
        """When a waiting request gives up by itself."""
        self._arrivals = 0
        self._unplaced: set[str] = set()
        """Started, and not known to have found room."""
        self._window: int | None = None
        """How many of these there may be; None: no bound, nobody was refused."""
        self._blocked = False
        """The first of the queue found no room, and there is no news since."""
        self._drain = DrainRate(limits.rate_window_s)
        self._returns = ReturnTimes(limits.default_retry_after_s, limits.max_retry_after_s)

    # --- what is inside ----------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._records) - self.waiting

    @property
    def waiting(self) -> int:
        return len(self._ends)

    @property
    def waiting_tokens(self) -> int:
        return sum(tier.tokens for tier in self._tiers.values())

    @property
    def blocked(self) -> bool:
        """Somebody waits for room at decode: tell news of it (`room`)."""
        return self._blocked

    def waiting_by_priority(self) -> Mapping[int, int]:
        return {priority: len(tier.waiting) for priority, tier in self._tiers.items()}

    def tenants(self) -> int:
        """Accounts: tenants with something inside, per priority."""
        return sum(tier.tenants for tier in self._tiers.values())

    def next_expiry(self) -> float | None:
        """When `expire` will have something to do."""
        return self._ends.peek()[0] if self._ends else None

    # --- the way through ---------------------------------------------------------------------------------------

    def enter(self, ticket: Ticket, now: float) -> Changes:
        """A request arrives: it is among the started, or waits. Raises NoPlace, TooLate; ValueError for one that is
        inside already."""
        if ticket.request in self._records:
            raise ValueError(f"request {ticket.request} is inside already")
        if ticket.start_by <= now:
            raise TooLate("the deadline cannot be met")
        direct = not self._ends and self.running < self._limits.max_running
        displaced = () if direct else self._make_place(ticket, now)
        if all(ticket.priority > priority for priority, tier in self._tiers.items() if tier.waiting):
            self._blocked = False  # what found no room was another
        self._arrivals += 1
        record = self._tier(ticket.priority).add(ticket, self._arrivals)
        self._records[ticket.request] = record
        self._ends.push(ticket.request, ticket.start_by)
        return Changes(self._start(now), displaced)

    def placed(self, request: str, now: float) -> Changes:
        """Decode has promised room to a started request."""
        if request not in self._unplaced:
            return Changes()
        self._unplaced.discard(request)
        record = self._records[request]
        record.refused_at, record.placed_at = None, now
        self._drain.began(now)
        if self._window is not None:
            self._window += 1
        return Changes(self._start(now))

    def no_room(self, request: str, now: float) -> Changes:
        """No decode rank had room for a started request: it waits again. Raises NoPlace when it may not, and then it is
        not inside any more."""
        record = self._records[request]
        if record.placed_at is not None:
            self._drain.gave_back(record.placed_at)
            record.placed_at = None
        ticket = record.ticket
        since = record.refused_at = now if record.refused_at is None else record.refused_at
        until = since + self._limits.room_wait_s
        self._unplaced.discard(request)
        try:
            if now >= until:
                raise self._no_place(ticket, Cause.ROOM, now)
            if ticket.start_by <= now:
                raise TooLate(f"the deadline cannot be met after {now - since:.1f} s without room at decode")
            displaced = self._make_place(ticket, now, returns=True)
        except Refused:
            self._remove(record)
            raise
        self._tiers[ticket.priority].back(record)
        self._ends.push(request, min(until, ticket.start_by))
        self._blocked, self._window = True, 1
        return Changes((), displaced)

    def room(self, now: float) -> Changes:
        """News: decode may have room."""
        self._blocked = False
        return Changes(self._start(now))

    def correct(self, request: str, tokens: int) -> None:
        """What a running request's prefill really had to compute. Unknown requests are no error."""
        record = self._records.get(request)
        if record is not None:
            self._tiers[record.ticket.priority].correct(record, tokens)

    def leave(self, request: str, now: float) -> Changes:
        """The request is over, or gave up waiting. Unknown ones are no error."""
        record = self._records.get(request)
        if record is not None:
            if record.placed_at is not None:
                self._drain.ended(record.charged, record.placed_at, now)
            self._unplaced.discard(request)
            self._remove(record)
        return Changes(self._start(now))

    def expire(self, now: float) -> Changes:
        """End what waits in vain."""
        ended: list[tuple[str, Refused]] = []
        while self._ends and self._ends.peek()[0] <= now:
            _, request = self._ends.peek()
            record = self._records[request]
            late = record.ticket.start_by <= now
            error = (
                TooLate("the deadline cannot be met any more; the request waited in the queue")
                if late
                else self._no_place(record.ticket, Cause.ROOM, now)
            )
            ended.append((request, error))
            self._remove(record)
        return Changes(self._start(now), tuple(ended))

    def predicted(self, reason: str, retry_after_s: float) -> NoPlace:
        """The refusal of a request that a balancer rejected (router/balancers/base.py, Rejected)."""
        return NoPlace(reason, Cause.PREDICTED, max(0.1, min(retry_after_s, self._limits.max_retry_after_s)))

    # --- inside ------------------------------------------------------------------------------------------------

    def _start(self, now: float) -> tuple[str, ...]:
        started: list[str] = []
        while self._ends and not self._blocked and self.running < self._limits.max_running:
            if self._window is not None and len(self._unplaced) >= self._window:
                break
            record = next(tier for tier in self._downwards() if tier.waiting).next()
            self._ends.discard(record.ticket.request)
            self._unplaced.add(record.ticket.request)
            started.append(record.ticket.request)
        if not self._ends:
            self._blocked, self._window = False, None
        return tuple(started)

    def _remove(self, record: Record) -> None:
        ticket = record.ticket
        if record.refused_at is not None and not record.running:
            self._blocked = False  # the next one may need less room
        del self._records[ticket.request]
        self._ends.discard(ticket.request)
        tier = self._tiers[ticket.priority]
        tier.leave(record)
        if tier.empty:
            del self._tiers[ticket.priority]
            self._priorities.remove(ticket.priority)

    def _tier(self, priority: int) -> Tier:
        tier = self._tiers.get(priority)
        if tier is None:
            tier = self._tiers[priority] = Tier(self._limits.quantum_tokens)
            insort(self._priorities, priority)
        return tier

    def _downwards(self) -> Iterator[Tier]:
        return (self._tiers[priority] for priority in reversed(self._priorities))

    # --- bounds ------------------------------------------------------------------------------------------------

    def _make_place(self, ticket: Ticket, now: float, *, returns: bool = False) -> tuple[tuple[str, Refused], ...]:
        """Room in the queue for one more, at the cost of the newest of lower priorities; of its own too for one that
        `returns`, which is ahead of all of them. Raises NoPlace, and nothing has changed then."""
        own = [] if returns else self._beyond_share(ticket, now)
        below = [
            self._tiers[priority]
            for priority in self._priorities
            if priority < ticket.priority or (returns and priority == ticket.priority)
        ]
        others = self.waiting - sum(len(tier.waiting) for tier in below)
        tokens = self.waiting_tokens - sum(tier.tokens for tier in below)
        cause = self._over(others, tokens, ticket.cost)
        if cause is not None:
            raise self._no_place(ticket, Cause.ROOM if returns else cause, now)
        displaced = [self._displace(record, now) for record in own]
        while self._over(self.waiting, self.waiting_tokens, ticket.cost) is not None:
            victim = next(tier for tier in below if tier.waiting).waiting
            displaced.append(self._displace(victim[next(reversed(victim))], now))
        return tuple(displaced)

    def _displace(self, record: Record, now: float) -> tuple[str, Refused]:
        error = self._no_place(record.ticket, Cause.DISPLACED, now)
        self._remove(record)
        return record.ticket.request, error

    def _over(self, waiting: int, tokens: int, cost: int) -> Cause | None:
        """Which bound one more would break. One that is larger than the bound of tokens waits alone."""
        if waiting >= self._limits.max_waiting:
            return Cause.REQUESTS
        if waiting and tokens + cost > self._limits.max_waiting_tokens:
            return Cause.TOKENS
        return None

    def _beyond_share(self, ticket: Ticket, now: float) -> list[Record]:
        """Of the room that others leave, a tenant takes at most its share, but always one request; so whoever floods
        leaves room for who comes after (dynamic thresholds, Choudhury and Hahne, 1998). Beyond it the tenant's own
        newest requests of lower priorities make place: these are returned. Raises NoPlace where they are too few."""
        share = self._limits.tenant_share
        if share >= 1.0:
            return []
        accounts = [account for tier in self._tiers.values() if (account := tier.account(ticket.tenant)) is not None]
        own = sum(len(account.waiting) for account in accounts)
        own_tokens = sum(account.tokens for account in accounts)
        room = share * (self._limits.max_waiting - (self.waiting - own))
        room_tokens = share * (self._limits.max_waiting_tokens - (self.waiting_tokens - own_tokens))
        lower = (
            record
            for priority in self._priorities
            if priority < ticket.priority
            for record in reversed(self._tiers[priority].waiting.values())
            if record.ticket.tenant == ticket.tenant
        )
        victims: list[Record] = []
        while own and (own + 1 > room or own_tokens + ticket.cost > room_tokens):
            victim = next(lower, None)
            if victim is None:
                raise self._no_place(ticket, Cause.TENANT, now)
            victims.append(victim)
            own, own_tokens = own - 1, own_tokens - victim.ticket.cost
        return victims

    def _no_place(self, ticket: Ticket, cause: Cause, now: float) -> NoPlace:
        """Its tokens stand in the line of those to come back."""
        ahead = sum(len(self._tiers[priority].waiting) for priority in self._priorities if priority >= ticket.priority)
        rate = self._drain.rate(now)
        message = {
            Cause.REQUESTS: f"the queue is full: {self.waiting} requests wait, {ahead} of them before this one",
            Cause.TOKENS: f"the queue is full: {self.waiting_tokens} tokens wait in {self.waiting} requests",
            Cause.TENANT: "this tenant fills its share of the queue",
            Cause.DISPLACED: "a request of a higher priority took its place in the full queue",
            Cause.ROOM: f"no decode replica has room, and {self.waiting} requests wait",
        }[cause]
        return NoPlace(message, cause, self._returns.next(ticket.cost, rate, now))
