"""Deficit round robin over the tenants of one priority, in tokens (Shreedhar and Varghese, 1995).

Tenants that wait stand in a ring. At each visit a tenant gets a quantum and runs requests while its deficit covers
their cost; the rest of the deficit stays for its next visit. Visits that would serve nothing are not made: a tenant's
next useful round follows from its deficit and its next request's cost, so the ring is a heap of (round, place in the
ring) and every operation is O(log n), however large a request is against the quantum.

For tenants that wait all the time since one moment, the tokens served since then differ by less than one quantum + the
largest request. Inside a tenant the earliest `start_by` goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from headrace.router.admission.heap import LazyHeap
from headrace.router.admission.terms import Ticket


@dataclass(eq=False, slots=True)
class Account:
    """A tenant of the tier, as long as it has a request inside, waiting or running."""

    tenant: bytes
    place: int
    """In the ring."""
    waiting: LazyHeap[str] = field(default_factory=LazyHeap)
    deficit: int = 0
    """Tokens it may still take; below 0 after a request that cost more than it was charged."""
    visited: int = 0
    """The round up to which it has had its quanta."""
    running: int = 0
    tokens: int = 0
    """Cost of what waits."""
    period: int = 0
    """The busy period of `deficit`."""


@dataclass(eq=False, slots=True)
class Record:
    """A request inside."""

    ticket: Ticket
    arrival: int
    account: Account
    charged: int = 0
    """What its tenant was charged for it; 0 while it waits."""
    period: int = -1
    """The busy period of the charge."""
    running: bool = False
    refused_at: float | None = None
    """When decode first had no room for it."""
    placed_at: float | None = None
    """When decode promised it room."""


class Tier:
    """All requests of one priority."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._accounts: dict[bytes, Account] = {}
        self._ring: LazyHeap[bytes] = LazyHeap()
        self._round = 0
        self._joins = 0
        self._period = 0
        self.waiting: OrderedDict[str, Record] = OrderedDict()
        """In order of arrival."""
        self.tokens = 0
        """Cost of what waits."""

    @property
    def empty(self) -> bool:
        """Nobody is inside: nothing to remember."""
        return not self._accounts

    @property
    def tenants(self) -> int:
        return len(self._accounts)

    def account(self, tenant: bytes) -> Account | None:
        return self._accounts.get(tenant)

    def add(self, ticket: Ticket, arrival: int) -> Record:
        """A new request waits."""
        account = self._accounts.get(ticket.tenant)
        if account is None:
            account = self._accounts[ticket.tenant] = Account(ticket.tenant, 0)
        record = Record(ticket, arrival, account)
        self._settle(account)
        if not account.waiting:
            self._join(account)
        self._wait(record)
        return record

    def back(self, record: Record) -> None:
        """A request that was started and found no room waits again, first in its tenant's turn and with no charge."""
        account, cost = record.account, record.ticket.cost
        self._settle(account)
        if record.period == self._period:
            account.deficit += record.charged
        if not account.waiting:
            # Its turn is not over.
            account.visited, account.deficit = self._round, max(account.deficit, cost)
        account.running -= 1
        record.charged, record.period, record.running = 0, -1, False
        self._wait(record)
        self.waiting.move_to_end(record.ticket.request, last=False)

    def next(self) -> Record:
        """Start the next request, and charge its tenant. Raises IndexError when nobody waits."""
        (turn, _), tenant = self._ring.peek()
        account = self._accounts[tenant]
        self._round = turn
        account.deficit += self._quantum * (turn - account.visited)
        account.visited = turn
        record = self.waiting[account.waiting.peek()[1]]
        self._unwait(record)
        record.charged, record.period, record.running = record.ticket.cost, self._period, True
        account.deficit -= record.charged
        account.running += 1
        self._rank(account)
        return record

    def leave(self, record: Record) -> None:
        """A request is over, or gave up waiting."""
        account = record.account
        if record.running:
            account.running -= 1
        else:
            self._unwait(record)
            self._rank(account)
        if not account.running and not account.waiting:
            del self._accounts[account.tenant]

    def correct(self, record: Record, tokens: int) -> None:
        """What a running request really cost: the difference is taken from its tenant, or given back. Of a busy period
        that is over nothing is owed: nobody waited for it."""
        if not record.running or record.period != self._period:
            return
        account = record.account
        self._settle(account)
        cost = max(1, tokens)
        account.deficit += record.charged - cost
        record.charged = cost
        self._rank(account)

    # --- inside ------------------------------------------------------------------------------------------------

    def _join(self, account: Account) -> None:
        """Behind everybody: its first visit is in the next round."""
        self._joins += 1
        account.place, account.visited = self._joins, self._round

    def _wait(self, record: Record) -> None:
        ticket = record.ticket
        record.account.waiting.push(ticket.request, (ticket.start_by, record.arrival))
        record.account.tokens += ticket.cost
        self.tokens += ticket.cost
        self.waiting[ticket.request] = record
        self._rank(record.account)

    def _unwait(self, record: Record) -> None:
        record.account.waiting.discard(record.ticket.request)
        record.account.tokens -= record.ticket.cost
        self.tokens -= record.ticket.cost
        del self.waiting[record.ticket.request]

    def _settle(self, account: Account) -> None:
        """Nothing is carried over from a busy period that is over."""
        if account.period != self._period:
            account.period, account.deficit = self._period, 0

    def _rank(self, account: Account) -> None:
        """Its next useful visit. One that waits for nothing has no turn, and saves none up."""
        if not account.waiting:
            self._ring.discard(account.tenant)
            account.deficit = min(account.deficit, 0)
            if not self.waiting:
                self._period += 1
            return
        missing = self.waiting[account.waiting.peek()[1]].ticket.cost - account.deficit
        rounds = max(0, -(-missing // self._quantum))
        self._ring.push(account.tenant, (max(self._round, account.visited + rounds), account.place))
