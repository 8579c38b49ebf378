"""All ranks that requests may be sent to, and their loads: numpy columns by rank number.

A load is the rank's last report plus what this router has sent since (L22); without a fresh report that can be true,
all that this router has in flight there. In-flight work is a live set, and columns are exact sums over it (integers:
nothing drifts, L11). Members are lives of replicas (L14): a restarted replica is another member.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from headrace.router.columns import Columns, build
from headrace.router.loads import ATTENTION, FIELDS, NANO, REQUESTS, TOKENS, Loads, Tables
from headrace.router.ranks import RankNumbers
from headrace.router.reports import Report, absurdity
from headrace.router.topology import Candidate, RankId, Role


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of work."""

    tokens: int = 0
    """Prefill: new tokens to compute. Decode: KV tokens at admission. Encoder: image tokens."""
    hit_tokens: int = 0
    """Prefill: cached tokens that are used."""
    requests: int = 0
    """Decode: choices, since each takes a slot."""
    seconds: float = 0.0
    """Predicted work."""
    attention: float = 0.0
    """Σ new · (hit + new/2), in pairs of tokens: prefill's core-attention compute."""


@dataclass(eq=False, slots=True)
class _Entry:
    """Work in flight."""

    amount: tuple[int, int, int, int, int]
    seconds: float
    since: float
    covered: bool = False
    """The rank's last report counts it."""


@dataclass(slots=True)
class _Live:
    """Of one rank."""

    entries: dict[str, _Entry] = field(default_factory=dict)
    uncovered: deque[_Entry] = field(default_factory=deque)
    """In the order of `since`; ended ones are skipped when their turn comes."""


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
        self._stale_after_s = stale_after_s
        self._half_life_s = half_life_s
        self._settle_s = settle_s
        self._members: dict[str, tuple[str, tuple[Candidate, ...]]] = {}
        self._known: dict[int, Candidate] = {}
        """By number; also those that nothing new is sent to."""
        self._columns: dict[Role, Columns] = {}
        self._data_centres: dict[str, int] = {}
        self._live: dict[int, _Live] = {}
        self._tables = _grown(None, 0)
        self._decayed_at = 0.0
        self._steps: dict[int, int] = {}
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
        for candidate in ranks:
            number = self.numbers.take(candidate.id)
            self._grow()
            if number not in self._known:
                self._clear(number)
                peers = [other for other, known in self._known.items() if known.role is candidate.role]
                # It joins beside the least assigned one: from 0 it would draw everything until it had caught up.
                self._tables.assigned[number] = self._tables.assigned[peers].min(axis=0) if peers else 0.0
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
        until a better one comes (L22)."""
        number = self.numbers.get(rank)
        candidate = self._known.get(number) if number is not None else None
        if number is None or candidate is None:
            return False
        if absurdity(report, candidate) is not None:
            self.absurd[rank] = self.absurd.get(rank, 0) + 1
            self._tables.reported_at[number] = -math.inf
            return False
        if report.step < self._steps.get(number, 0):
            return False
        self._steps[number] = report.step
        waiting = report.queued_requests + report.reserved_requests
        self._tables.reported[number] = (report.tokens(candidate.role), report.requests, waiting)
        self._tables.told[number] = (report.queue_s or 0.0, report.step_s)
        self._tables.reported_at[number] = now
        self._cover(number, now - self._settle_s, counts)
        return True

    def begin(self, rank: RankId, key: str, amount: Amount, now: float) -> None:
        """Work was sent; it counts from now on. The same key again replaces it. Nothing is counted at a rank that has
        left."""
        number = self.numbers.get(rank)
        if number is None or number not in self._known:
            return
        self.end(rank, key)
        vector = (
            amount.tokens,
            amount.hit_tokens,
            amount.requests,
            round(amount.seconds * NANO),
            round(amount.attention),
        )
        entry = _Entry(vector, amount.seconds, now)
        live = self._live.setdefault(number, _Live())
        live.entries[key] = entry
        live.uncovered.append(entry)
        self._tables.own[number] += vector
        self._tables.since[number] += vector
        self._decay(now)
        self._tables.assigned[number] += (amount.seconds, amount.attention)

    def end(self, rank: RankId, key: str, now: float | None = None, worked: Amount | None = None) -> None:
        """The work is over, however it ended. `worked`, with `now`: what it really was, which corrects the assigned
        work. Unknown work is no error: its rank may have been forgotten."""
        number = self.numbers.get(rank)
        live = self._live.get(number) if number is not None else None
        entry = live.entries.pop(key, None) if live is not None else None
        if number is None or live is None or entry is None:
            return
        self._tables.own[number] -= entry.amount
        if entry.covered:
            # Decode ranks end several per cent of their requests between two reports.
            reported = self._tables.reported[number]
            reported[0] = max(0, reported[0] - entry.amount[TOKENS])
            reported[1] = max(0, reported[1] - entry.amount[REQUESTS])
        else:
            self._tables.since[number] -= entry.amount
            entry.covered = True
        if worked is not None and now is not None:
            self._decay(now)
            told = np.array((worked.seconds - entry.seconds, worked.attention - entry.amount[ATTENTION]))
            corrected = self._tables.assigned[number] + told * self._left(now - entry.since)
            if np.isfinite(corrected).all():
                self._tables.assigned[number] = np.maximum(0.0, corrected)
        if not live.entries:
            del self._live[number]
        elif len(live.uncovered) > 2 * len(live.entries) + 16:
            live.uncovered = deque(entry for entry in live.uncovered if not entry.covered)

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
        self._decay(now)
        return Loads(role, self.columns(role), self._tables, now - self._stale_after_s)

    def known(self, rank: RankId) -> tuple[int, Candidate] | None:
        """Number and capacity of a rank that has not been forgotten."""
        number = self.numbers.get(rank)
        candidate = self._known.get(number) if number is not None else None
        return None if number is None or candidate is None else (number, candidate)

    def own(self, rank: RankId) -> Amount:
        """What this router has in flight at the rank."""
        number = self.numbers.get(rank)
        if number is None or number >= len(self._tables.own):
            return Amount()
        tokens, hits, requests, nanos, attention = self._tables.own[number].tolist()
        return Amount(tokens, hits, requests, nanos / NANO, float(attention))

    def in_flight(self, rank: RankId) -> int:
        """Pieces of work of this router at the rank."""
        number = self.numbers.get(rank)
        live = self._live.get(number) if number is not None else None
        return len(live.entries) if live is not None else 0

    @property
    def idle(self) -> bool:
        """Nothing of this router is in flight anywhere."""
        return not self._live

    def __contains__(self, rank: RankId) -> bool:
        """Whether that life of its replica takes work."""
        current = self._members.get(rank.replica_id)
        return current is not None and current[0] == rank.incarnation

    def _cover(self, number: int, before: float, counts: str | None) -> None:
        live = self._live.get(number)
        if live is None:
            return
        certain = live.entries.get(counts) if counts is not None else None
        if certain is not None and not certain.covered:
            certain.covered = True
            self._tables.since[number] -= certain.amount
        while live.uncovered and (live.uncovered[0].covered or live.uncovered[0].since < before):
            entry = live.uncovered.popleft()
            if not entry.covered:
                entry.covered = True
                self._tables.since[number] -= entry.amount

    def _left(self, age_s: float) -> float:
        return 1.0 if self._half_life_s is None else 0.5 ** (max(0.0, age_s) / self._half_life_s)

    def _decay(self, now: float) -> None:
        if self._half_life_s is not None and now > self._decayed_at:
            assigned = self._tables.assigned
            np.multiply(assigned, self._left(now - self._decayed_at), out=assigned)
            self._decayed_at = now

    def _grow(self) -> None:
        size = len(self._tables.own)
        if self.numbers.size > size:
            self._tables = _grown(self._tables, max(self.numbers.size, 2 * size, 8))

    def _clear(self, number: int) -> None:
        if number < len(self._tables.own):
            self._tables.own[number] = self._tables.since[number] = 0
            self._tables.reported[number] = 0
            self._tables.told[number] = 0.0
            self._tables.reported_at[number] = -math.inf
            self._tables.assigned[number] = 0.0
        self._live.pop(number, None)
        self._steps.pop(number, None)

    def _build(self, role: Role) -> Columns:
        ranks = (rank for _, ranks in self._members.values() for rank in ranks if rank.role is role)
        return build(sorted(ranks, key=lambda rank: rank.id), self.numbers, self._data_centres)


def _grown(tables: Tables | None, size: int) -> Tables:
    """Tables of `size` ranks that begin with what `tables` has."""
    bigger = Tables(
        own=np.zeros((size, FIELDS), np.int64),
        since=np.zeros((size, FIELDS), np.int64),
        reported=np.zeros((size, 3), np.int64),
        told=np.zeros((size, 2)),
        reported_at=np.full(size, -math.inf),
        assigned=np.zeros((size, 2)),
    )
    if tables is not None:
        for old, new in zip(tables, bigger, strict=True):
            new[: len(old)] = old
    return bigger
