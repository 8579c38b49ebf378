"""Loads of the ranks of one role, worked out of the fleet's tables as they are asked for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.router.columns import Columns, Flags, Floats, Ints
from headrace.router.topology import Role

FIELDS = 5
TOKENS, HITS, REQUESTS, NANOS, ATTENTION = range(FIELDS)
"""Columns of work in flight; its seconds are kept in nanoseconds, so that sums are exact."""
NANO = 1_000_000_000


class Tables(NamedTuple):
    """By rank number."""

    own: Ints
    """Sums over all entries in flight, [numbers, FIELDS]."""
    since: Ints
    """Sums over those that the last report does not count."""
    reported: Ints
    """Tokens, requests and waiting requests of the last report, without what it counts and has ended since,
    [numbers, 3]."""
    reported_at: Floats
    assigned: Floats
    """Seconds and pairs of tokens, decayed, [numbers, 2]."""


class Loads:
    """In the order of `columns`, one entry per rank. Good until the fleet changes."""

    def __init__(self, role: Role, columns: Columns, tables: Tables, oldest: float) -> None:
        """`oldest`: a report from before then is stale."""
        self._role = role
        self._columns = columns
        self._tables = tables
        self.fresh: Flags = tables.reported_at[columns.index] >= oldest
        """Whether a believable report that is not stale is in it."""
        self._all = bool(self.fresh.all())
        self._none = not self._all and not self.fresh.any()

    @property
    def tokens(self) -> Ints:
        """Report's (waiting prompt tokens, or KV tokens) plus own since; without a fresh report all own."""
        return self._with_report(0, TOKENS)

    @property
    def requests(self) -> Ints:
        """The same of requests. A request lives at decode until its end: a rank that says it has fewer than this router
        knows of is behind."""
        requests = self._with_report(1, REQUESTS)
        return np.maximum(requests, self.own) if self._role is Role.DECODE else requests

    @property
    def waiting(self) -> Ints:
        """Requests that have not begun to run: reported reservations and queue, plus own since."""
        return self._with_report(2, REQUESTS)

    @property
    def queue_s(self) -> Floats:
        """Predicted seconds of what was sent since the report; without a fresh one of all own."""
        seconds: Floats = self._since(NANOS) / NANO
        return seconds

    @property
    def own(self) -> Ints:
        """Requests that this router has in flight there."""
        return self._tables.own[self._columns.index, REQUESTS]

    @property
    def assigned(self) -> Floats:
        """Seconds of work that this router has sent there, decayed."""
        return self._tables.assigned[self._columns.index, 0]

    @property
    def assigned_attention(self) -> Floats:
        """Pairs of tokens of that work, decayed alike."""
        return self._tables.assigned[self._columns.index, 1]

    def _since(self, field: int) -> Ints:
        index = self._columns.index
        if self._all:
            return self._tables.since[index, field]
        if self._none:
            return self._tables.own[index, field]
        since: Ints = np.where(self.fresh, self._tables.since[index, field], self._tables.own[index, field])
        return since

    def _with_report(self, reported: int, field: int) -> Ints:
        since = self._since(field)
        if self._none:
            return since
        told = self._tables.reported[self._columns.index, reported]
        total: Ints = since + (told if self._all else np.where(self.fresh, told, 0))
        return total
