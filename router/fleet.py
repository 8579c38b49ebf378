"""All ranks that requests may be sent to, and their loads.

A load is the rank's last report plus what this router has sent since (L22); without a fresh report that can be true,
all that this router has in flight there (accounts.py). Members are lives of replicas (L14): a restarted replica is
another member.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.router.accounts import Accounts
from headrace.router.accounts import Amount as Amount
from headrace.router.columns import Columns, Floats, build
from headrace.router.loads import Loads, Tables
from headrace.router.ranks import RankNumbers
from headrace.router.reports import Report, absurdity, leaps
from headrace.router.topology import Candidate, RankId, Role


class Fleet:
    """Members and loads of one model group. For one thread; time is an argument, in seconds on any monotonic clock."""

    def __init__(
        self,
        numbers: RankNumbers,
        *,
        stale_after_s: float = 10.0,
        half_life_s: float | None = 60.0,
        settle_s: float = 0.0,
    ) -> None:
        """`half_life_s`: of assigned work; None: it never decays. `settle_s`: a report counts only work that was sent
        longer ago than this when it arrives, since it was written a little before."""
        if stale_after_s <= 0 or (half_life_s is not None and half_life_s <= 0) or settle_s < 0:
            raise ValueError("stale_after_s and half_life_s must be positive, settle_s not negative")
        self.numbers = numbers
        self.stale_after_s = stale_after_s
        self._settle_s = settle_s
        self._members: dict[str, tuple[str, tuple[Candidate, ...]]] = {}
        self._known: dict[int, Candidate] = {}
        """By number; also those that nothing new is sent to."""
        self._columns: dict[Role, Columns] = {}
        self._data_centres: dict[str, int] = {}
        self._accounts = Accounts(half_life_s)
        self._steps: dict[int, tuple[int, float]] = {}
        """By number: step of the last report that was believed, and when it came."""
        self.absurd: dict[RankId, int] = {}
        """Reports that could not be true, of ranks that are still known."""

    def put(self, replica_id: str, incarnation: str, candidates: Iterable[Candidate]) -> str | None:
        """Add or replace a replica; returns the incarnation that it replaces, whose handles are now void. Its ranks
        stay known until they are forgotten."""
        previous = self._members.get(replica_id)
        ranks = tuple(candidates)
        if previous == (incarnation, ranks):
            return None
        self._members[replica_id] = (incarnation, ranks)
        self._columns.clear()
        least: dict[Role, Floats] = {}
        for candidate in ranks:
            role, number = candidate.role, self.numbers.take(candidate.id)
            self._accounts.grow(self.numbers.size)
            if number not in self._known:
                self._clear(number)
                # Once for all newcomers of a role: none of them changes it.
                if role not in least:
                    peers = [other for other, known in self._known.items() if known.role is role]
                    least[role] = self._accounts.least(peers)
                self._accounts.join(number, least[role])
            self._known[number] = candidate
        return previous[0] if previous is not None and previous[0] != incarnation else None

    def remove(self, replica_id: str, incarnation: str) -> bool:
        """Nothing new goes to that life of a replica; false if another life stands there, which stays. What is in
        flight there counts until it ends or the rank is forgotten."""
        current = self._members.get(replica_id)
        if current is None or current[0] != incarnation:
            return False
        del self._members[replica_id]
        self._columns.clear()
        return True

    def forget(self, rank: RankId) -> int | None:
        """The rank is gone, with all that is in flight there. Returns its number, which the next newcomer may get:
        whoever keeps other tables by number clears them now. None for an unknown rank."""
        current = self._members.get(rank.replica_id)
        if current is not None and current[0] == rank.incarnation:
            self.remove(rank.replica_id, rank.incarnation)
        number = self.numbers.release(rank)
        if number is not None:
            self._known.pop(number, None)
            self._clear(number)
        self.absurd.pop(rank, None)
        return number

    def report(self, rank: RankId, report: Report, now: float, counts: str | None = None) -> bool:
        """A rank's own account. `counts`: key of work that it counts for certain, however young. False: dropped, since
        the rank is unknown, the report older than the last one, or absurd; after an absurd one own knowledge decides
        until a better one comes (L22). A report that nothing followed for `stale_after_s` makes none older: its step
        may have been untrue."""
        number = self.numbers.get(rank)
        candidate = self._known.get(number) if number is not None else None
        if number is None or candidate is None:
            return False
        last, at = self._steps.get(number, (-1, now))
        known = last >= 0
        if absurdity(report, candidate) is not None or (known and leaps(report.step, last, now - at)):
            self.absurd[rank] = self.absurd.get(rank, 0) + 1
            self._accounts.distrust(number)
            return False
        if report.step < last:
            if now - at <= self.stale_after_s:
                return False
            last = -1
        self._steps[number] = report.step, now
        waiting = report.queued_requests + report.reserved_requests
        # One that has work and does not step says the same over and over: it grows old (L22).
        new = report.step > last or not (report.running_requests or report.queued_requests)
        if counts is not None:
            self._accounts.cover(number, counts)
        self._accounts.report(
            number,
            (report.tokens(candidate.role), report.requests, waiting),
            now if new else None,
            now - self._settle_s,
        )
        return True

    def begin(self, rank: RankId, key: str, amount: Amount, now: float) -> None:
        """Work was sent; it counts from now on. The same key again replaces it. Nothing is counted at a rank that has
        left."""
        number = self.numbers.get(rank)
        if number is not None and number in self._known:
            self._accounts.begin(number, key, amount, now)

    def end(self, rank: RankId, key: str, now: float | None = None, worked: Amount | None = None) -> None:
        """The work is over, however it ended. `worked`, with `now`: what it really was, which corrects the assigned
        work. Unknown work is no error: its rank may have been forgotten."""
        number = self.numbers.get(rank)
        if number is not None:
            self._accounts.end(number, key, now, worked)

    def columns(self, role: Role) -> Columns:
        """The ranks of a role that take work; the same object until membership changes."""
        columns = self._columns.get(role)
        if columns is None:
            columns = self._columns[role] = self._build(role)
        return columns

    @property
    def data_centres(self) -> int:
        """Data centres that ranks were ever known in."""
        return len(self._data_centres)

    def candidates(self, role: Role) -> tuple[Candidate, ...]:
        """All ranks of a role that take work, in a stable order."""
        return self.columns(role).candidates

    def loads(self, role: Role, now: float) -> Loads:
        """Loads of `columns(role)`, entry by entry."""
        return Loads(role, self.columns(role), self.tables(now), now - self.stale_after_s)

    def tables(self, now: float) -> Tables:
        """What loads are made of, by rank number; the same arrays until there are more ranks."""
        return self._accounts.tables(now)

    def known(self, rank: RankId) -> tuple[int, Candidate] | None:
        """Number and capacity of a rank that has not been forgotten."""
        number = self.numbers.get(rank)
        candidate = self._known.get(number) if number is not None else None
        return None if number is None or candidate is None else (number, candidate)

    def own(self, rank: RankId) -> Amount:
        """What this router has in flight at the rank."""
        number = self.numbers.get(rank)
        return Amount() if number is None else self._accounts.own(number)

    def in_flight(self, rank: RankId) -> int:
        """Pieces of work of this router at the rank."""
        number = self.numbers.get(rank)
        return 0 if number is None else self._accounts.in_flight(number)

    @property
    def idle(self) -> bool:
        """Nothing of this router is in flight anywhere."""
        return self._accounts.idle

    def __contains__(self, rank: RankId) -> bool:
        """Whether that life of its replica takes work."""
        current = self._members.get(rank.replica_id)
        return current is not None and current[0] == rank.incarnation

    def _clear(self, number: int) -> None:
        self._accounts.clear(number)
        self._steps.pop(number, None)

    def _build(self, role: Role) -> Columns:
        ranks = (rank for _, ranks in self._members.values() for rank in ranks if rank.role is role)
        return build(sorted(ranks, key=lambda rank: rank.id), self.numbers, self._data_centres)
