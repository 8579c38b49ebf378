"""What is in flight at every rank, and what the ranks said of themselves: numpy columns by rank number.

In-flight work is a live set, and columns are exact sums over it (integers: nothing drifts, L11). Single entries are
changed through memoryviews: an access costs 40 ns, an array's row several microseconds, and every request changes four.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from headrace.router.columns import Floats
from headrace.router.loads import ATTENTION, FIELDS, HITS, NANO, NANOS, REQUESTS, TOKENS, Tables

LEAST_LEFT = 0.5
"""Columns that would be halved are decayed before anything is added."""


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


class Accounts:
    """Rows are rank numbers; `grow` makes room before a number is used."""

    def __init__(self, half_life_s: float | None) -> None:
        """`half_life_s`: of assigned work; None: it never decays."""
        self._half_life_s = half_life_s
        self._live: dict[int, _Live] = {}
        self._decayed_at = 0.0
        self._use(_grown(None, 0))

    def _use(self, tables: Tables) -> None:
        self._tables = tables
        self._own, self._since = tables.own.reshape(-1).data, tables.since.reshape(-1).data
        self._reported = tables.reported.reshape(-1).data
        self._assigned = cast("memoryview[float]", tables.assigned.reshape(-1).data)

    def tables(self, now: float) -> Tables:
        """All columns as of now; the same arrays until there are more ranks."""
        self._decay(now)
        return self._tables

    def grow(self, size: int) -> None:
        """Make room for so many numbers."""
        room = len(self._tables.own)
        if size > room:
            self._use(_grown(self._tables, max(size, 2 * room, 8)))

    def clear(self, number: int) -> None:
        """The number is nobody's, or a newcomer's."""
        if number < len(self._tables.own):
            self._tables.own[number] = self._tables.since[number] = 0
            self._tables.reported[number] = 0
            self._tables.reported_at[number] = -math.inf
            self._tables.assigned[number] = 0.0
        self._live.pop(number, None)

    def least(self, peers: Sequence[int]) -> Floats:
        """What the least assigned of these ranks has of each, [2]; 0 of no ranks."""
        return self._tables.assigned[peers].min(axis=0) if peers else np.zeros(2)

    def join(self, number: int, least: Floats) -> None:
        """A newcomer stands beside the least assigned one of its peers (`least`): from 0 it would draw everything until
        it had caught up."""
        self._tables.assigned[number] = least

    # --- what ranks say --------------------------------------------------------------------------------------------

    def distrust(self, number: int) -> None:
        """What it said last is not believed any more: own knowledge decides (L22)."""
        self._tables.reported_at[number] = -math.inf

    def report(self, number: int, counts: tuple[int, int, int], now: float | None, before: float) -> None:
        """A rank's (tokens, requests, waiting requests). They count work that was sent before `before`. `now`: None for
        a report that is as old as the last one."""
        self._reported[3 * number], self._reported[3 * number + 1], self._reported[3 * number + 2] = counts
        if now is not None:
            self._tables.reported_at[number] = now
        live = self._live.get(number)
        while live is not None and live.uncovered and (live.uncovered[0].covered or live.uncovered[0].since < before):
            self._cover(number, live.uncovered.popleft())

    def cover(self, number: int, key: str) -> None:
        """The last report counts that work, however young."""
        live = self._live.get(number)
        entry = live.entries.get(key) if live is not None else None
        if entry is not None:
            self._cover(number, entry)

    def _cover(self, number: int, entry: _Entry) -> None:
        if not entry.covered:
            entry.covered = True
            _add(self._since, number, entry.amount, -1)

    # --- work ------------------------------------------------------------------------------------------------------

    def begin(self, number: int, key: str, amount: Amount, now: float) -> None:
        """Work was sent; it counts from now on. The same key again replaces it."""
        live = self._live.get(number)
        if live is not None and key in live.entries:
            self.end(number, key)
            live = self._live.get(number)
        if live is None:
            live = self._live[number] = _Live()
        vector = (
            amount.tokens,
            amount.hit_tokens,
            amount.requests,
            round(amount.seconds * NANO),
            round(amount.attention),
        )
        entry = live.entries[key] = _Entry(vector, amount.seconds, now)
        live.uncovered.append(entry)
        _add(self._own, number, vector, 1)
        _add(self._since, number, vector, 1)
        self._assign(number, amount.seconds, amount.attention, now)

    def end(self, number: int, key: str, now: float | None = None, worked: Amount | None = None) -> None:
        """The work is over, however it ended; `worked`, with `now`, corrects the assigned work. Unknown work is no
        error."""
        live = self._live.get(number)
        entry = live.entries.pop(key, None) if live is not None else None
        if live is None or entry is None:
            return
        _add(self._own, number, entry.amount, -1)
        if entry.covered:
            # Decode ranks end several per cent of their requests between two reports.
            reported, at = self._reported, 3 * number
            reported[at] = max(0, reported[at] - entry.amount[TOKENS])
            reported[at + 1] = max(0, reported[at + 1] - entry.amount[REQUESTS])
        else:
            _add(self._since, number, entry.amount, -1)
            entry.covered = True
        if worked is not None and now is not None:
            self._correct(number, entry, worked, now)
        if not live.entries:
            del self._live[number]
        elif len(live.uncovered) > 2 * len(live.entries) + 16:
            live.uncovered = deque(entry for entry in live.uncovered if not entry.covered)

    def _correct(self, number: int, entry: _Entry, worked: Amount, now: float) -> None:
        left = self._left(now - entry.since)
        seconds = (worked.seconds - entry.seconds) * left
        attention = (worked.attention - entry.amount[ATTENTION]) * left
        self._assign(number, seconds, attention, now)

    def _assign(self, number: int, seconds: float, attention: float, now: float) -> None:
        """Change assigned work as of now. The columns stand at an earlier moment: what is added now weighs as much more
        there, and one row is changed instead of all being decayed."""
        left, at = self._left(now - self._decayed_at), 2 * number
        if left < LEAST_LEFT:
            self._decay(now)
            left = 1.0
        seconds = self._assigned[at] + seconds / left
        attention = self._assigned[at + 1] + attention / left
        if math.isfinite(seconds) and math.isfinite(attention):
            self._assigned[at], self._assigned[at + 1] = max(0.0, seconds), max(0.0, attention)

    def own(self, number: int) -> Amount:
        """All that is in flight at a rank."""
        if number >= len(self._tables.own):
            return Amount()
        tokens, hits, requests, nanos, attention = self._tables.own[number].tolist()
        return Amount(tokens, hits, requests, nanos / NANO, float(attention))

    def in_flight(self, number: int) -> int:
        """Pieces of work at a rank."""
        live = self._live.get(number)
        return len(live.entries) if live is not None else 0

    @property
    def idle(self) -> bool:
        """Nothing is in flight anywhere."""
        return not self._live

    def _left(self, age_s: float) -> float:
        return 1.0 if self._half_life_s is None else 0.5 ** (max(0.0, age_s) / self._half_life_s)

    def _decay(self, now: float) -> None:
        if self._half_life_s is not None and now > self._decayed_at:
            assigned = self._tables.assigned
            np.multiply(assigned, self._left(now - self._decayed_at), out=assigned)
            self._decayed_at = now


def _add(column: memoryview, number: int, amount: tuple[int, int, int, int, int], sign: int) -> None:
    """Add an amount to a rank's row, or take it off."""
    at = number * FIELDS
    tokens, hits, requests, nanos, attention = amount
    column[at + TOKENS] += sign * tokens
    column[at + REQUESTS] += sign * requests
    if hits:
        column[at + HITS] += sign * hits
    if nanos:
        column[at + NANOS] += sign * nanos
    if attention:
        column[at + ATTENTION] += sign * attention


def _grown(tables: Tables | None, size: int) -> Tables:
    """Tables of `size` ranks that begin with what `tables` has."""
    bigger = Tables(
        own=np.zeros((size, FIELDS), np.int64),
        since=np.zeros((size, FIELDS), np.int64),
        reported=np.zeros((size, 3), np.int64),
        reported_at=np.full(size, -math.inf),
        assigned=np.zeros((size, 2)),
    )
    if tables is not None:
        for old, new in zip(tables, bigger, strict=True):
            new[: len(old)] = old
    return bigger
