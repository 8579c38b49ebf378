"""Prefill and decode chosen together: inside one data centre, or over a link that is paid for. See pair.md."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.router.balancers.base import Pair
from headrace.router.balancers.decode import Joint, Projection
from headrace.router.balancers.link import Links
from headrace.router.balancers.prefill import Assessment, NewWork
from headrace.router.columns import Columns, Floats, Ints
from headrace.router.fleet import Fleet
from headrace.router.index.base import PrefixMatch
from headrace.router.request import RoutingRequest
from headrace.router.topology import RankId, Role


@dataclass(frozen=True, slots=True)
class PairPolicy:
    """Parameters; pair.md says what they do."""

    neighbours: bool = True
    """Whether decode may lie in another data centre than prefill."""


class FirstPair(Protocol):
    """Finds the best pair only."""

    def first(self, request: RoutingRequest, match: PrefixMatch, now: float) -> Pair | None:
        """What `JointPair.order` would yield first; None: ask that."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Rows of one role in one data centre, best first, and their costs above the best of all, in seconds."""

    rows: Ints
    extra: Floats


class JointPair:
    """The pair balancer. Costs of both sides are seconds: extra work at prefill, extra time of the answer at decode."""

    def __init__(
        self,
        fleet: Fleet,
        prefill: NewWork,
        decode: Joint,
        policy: PairPolicy = PairPolicy(),
        links: Links | None = None,
        first: FirstPair | None = None,
    ) -> None:
        """`first`: a faster way to the pair that `order` begins with (router/native), asked while there is one data
        centre; None: there is no other."""
        self._first = first
        self._fleet = fleet
        self._prefill = prefill
        self._decode = decode
        self._policy = policy
        self._links = links or Links()

    def order(self, request: RoutingRequest, match: PrefixMatch, now: float) -> Iterator[Pair]:
        """Best first, made as they are asked for. Raises Rejected at the call."""
        probe = self._decode.probe(now)
        if self._first is not None and self._fleet.data_centres == 1 and probe is None:
            first = self._first.first(request, match, now)
            if first is not None:
                return self._begun(first, request, match, now)
        return self._all(request, match, now, probe=probe)

    def by_decode(
        self, request: RoutingRequest, match: PrefixMatch, now: float, last: Collection[RankId] = ()
    ) -> Iterator[Pair]:
        """The best pair of each decode rank, best first; those with one rank of `last` after the others, with two at
        the end. All but the first are found when the second is asked for. Raises Rejected at the call."""
        first = next(self.order(request, match, now), None)
        return iter(()) if first is None else self._each(first, request, match, now, last)

    def _each(
        self, first: Pair, request: RoutingRequest, match: PrefixMatch, now: float, last: Collection[RankId]
    ) -> Iterator[Pair]:
        done = None
        if first.prefill.id not in last and first.decode.id not in last:
            done = first.decode.id
            yield first
        both = self._both(request, match, now, check=False)
        if both is None:
            return
        sources, best, targets = both
        before, after = _sides(sources, best), self._targets(targets)
        sums = self._sums(request, before, after, now)
        avoided = _rows_of(sources.columns, last), _rows_of(targets.columns, last)
        lists = (
            _stream(target, after[target], before, sums, avoided, shunned)
            for target in after
            for shunned in (False, True)
        )
        for *_, source_row, row in heapq.merge(*lists):
            rank = targets.columns.candidates[row]
            if rank.id != done:
                choice = sources.choice(source_row, request.prompt_tokens)
                yield Pair(choice.rank, rank, choice.prediction)

    def _begun(self, first: Pair, request: RoutingRequest, match: PrefixMatch, now: float) -> Iterator[Pair]:
        """The first one is known already, and that nobody is to be rejected; the others when they are asked for."""
        yield first
        ranks = first.prefill.id, first.decode.id
        for pair in self._all(request, match, now, check=False):
            if (pair.prefill.id, pair.decode.id) != ranks:
                yield pair

    def _all(
        self, request: RoutingRequest, match: PrefixMatch, now: float, *, check: bool = True, probe: int | None = None
    ) -> Iterator[Pair]:
        both = self._both(request, match, now, check=check, probe=probe)
        return iter(()) if both is None else self._pairs(request, *both, now)

    def _both(
        self, request: RoutingRequest, match: PrefixMatch, now: float, *, check: bool, probe: int | None = None
    ) -> tuple[Assessment, int, Projection] | None:
        """Both sides, and the row of the best prefill rank; None where one side can hold no such request."""
        sources = self._prefill.assess(request, match, now)
        first = sources.best()
        if first is None:
            return None
        targets = self._decode.project(request, now + float(sources.ttft[first]), now, probe=probe)
        if not targets.fits.any():
            return None
        if check:
            self._decode.check(targets, request, now)
        return sources, first, targets

    def chosen(self, request: RoutingRequest, pair: Pair, now: float) -> None:
        """The request goes there; its KV is charged to the link that it crosses."""
        self._prefill.note(request, pair.prefill, now)
        if pair.prefill.data_centre != pair.decode.data_centre:
            prefill, decode = self._fleet.columns(Role.PREFILL), self._fleet.columns(Role.DECODE)
            source, target = prefill.data_centre_of(pair.prefill.id), decode.data_centre_of(pair.decode.id)
            if source is not None and target is not None:
                size = pair.prefill.kv_bytes(request.prompt_tokens)
                self._links.charge(source, target, size, self._accelerators(source, target), now)

    def clear(self, number: int) -> None:
        """A rank of either side is gone; its number is the next newcomer's."""
        self._prefill.clear(number)
        self._decode.clear(number)

    def _pairs(
        self, request: RoutingRequest, sources: Assessment, first: int, targets: Projection, now: float
    ) -> Iterator[Pair]:
        """Sums of two sorted lists for each pair of data centres, the least sum first."""
        found: tuple[int, int] | None = None
        if self._fleet.data_centres == 1:
            second = targets.best()
            if second is not None:
                found = first, second
                choice = sources.choice(first, request.prompt_tokens)
                yield Pair(choice.rank, targets.columns.candidates[second], choice.prediction)
        before, after = _sides(sources, first), self._targets(targets)
        heap: list[tuple[float, float, int, int, int, int]] = []
        sums = self._sums(request, before, after, now)
        for source, target in sums:
            heapq.heappush(heap, _entry(before, after, sums, source, target, 0, 0))
        while heap:
            _, _, source, target, i, j = heapq.heappop(heap)
            ours, theirs = before[source], after[target]
            rows = int(ours.rows[i]), int(theirs.rows[j])
            if rows != found:
                choice = sources.choice(rows[0], request.prompt_tokens)
                yield Pair(choice.rank, targets.columns.candidates[rows[1]], choice.prediction)
            if j + 1 < len(theirs.rows):
                heapq.heappush(heap, _entry(before, after, sums, source, target, i, j + 1))
            if j == 0 and i + 1 < len(ours.rows):
                heapq.heappush(heap, _entry(before, after, sums, source, target, i + 1, 0))

    def _sums(
        self, request: RoutingRequest, before: Collection[int], after: Collection[int], now: float
    ) -> dict[tuple[int, int], float]:
        """Seconds of the link between every two data centres that a request may have its two sides in."""
        return {
            (source, target): self._crossing(request, source, target, now)
            for source in before
            for target in after
            if source == target or self._policy.neighbours
        }

    def _targets(self, targets: Projection) -> dict[int, _Side]:
        """A slower pace makes the whole answer later; a full rank stands behind all that are not."""
        rows = targets.ranked()
        extra = self._decode.usual_tokens * (targets.pace - float(targets.pace[rows].min())) + FULL_S * targets.full
        if targets.probe is not None:
            extra[targets.probe] = 0.0
        return _by_centre(rows, extra, targets.columns.data_centre)

    def _crossing(self, request: RoutingRequest, source: int, target: int, now: float) -> float:
        if source == target:
            return 0.0
        # The ranks of a model agree on its layout (the registry refuses others): any of them tells.
        size = self._fleet.candidates(Role.PREFILL)[0].kv_bytes(request.prompt_tokens)
        return self._links.seconds(source, target, size, self._accelerators(source, target), now)

    def _accelerators(self, source: int, target: int) -> int:
        """One a rank, on the smaller side of a link."""
        prefill = int((self._fleet.columns(Role.PREFILL).data_centre == source).sum())
        decode = int((self._fleet.columns(Role.DECODE).data_centre == target).sum())
        return min(prefill, decode)


FULL_S = 1e6
"""More than any work: a rank that is full, or late, is asked after all others."""


def _sides(sources: Assessment, first: int) -> dict[int, _Side]:
    rows = sources.ranked()
    rows = np.concatenate(([first], rows[rows != first]))
    extra = sources.cost - float(sources.cost[first])
    if sources.late is not None:
        extra += FULL_S * sources.late
    extra[first] = extra[rows].min()  # a tie that rendezvous decided
    return _by_centre(rows, extra, sources.columns.data_centre)


def _by_centre(rows: Ints, extra: Floats, centres: Ints) -> dict[int, _Side]:
    """Split by data centre, order kept."""
    of = centres[rows]
    found = np.unique(of).tolist()
    if len(found) == 1:
        return {found[0]: _Side(rows, extra[rows])}
    return {centre: _Side(rows[of == centre], extra[rows[of == centre]]) for centre in found}


def _entry(
    before: dict[int, _Side],
    after: dict[int, _Side],
    sums: dict[tuple[int, int], float],
    source: int,
    target: int,
    i: int,
    j: int,
) -> tuple[float, float, int, int, int, int]:
    cost = float(before[source].extra[i])
    total = cost + float(after[target].extra[j]) + sums[source, target]
    # At equal sums the cheaper prefill goes first.
    return total, cost, source, target, i, j


def _rows_of(columns: Columns, ranks: Collection[RankId]) -> frozenset[int]:
    if not ranks:
        return frozenset()
    return frozenset(row for row, candidate in enumerate(columns.candidates) if candidate.id in ranks)


def _stream(
    target: int,
    side: _Side,
    before: dict[int, _Side],
    sums: dict[tuple[int, int], float],
    avoided: tuple[frozenset[int], frozenset[int]],
    shunned: bool,
) -> Iterator[tuple[int, float, float, int, int, int, int, int]]:
    """For each decode rank of a data centre that is to be avoided, or is not: how many ranks of its best pair are to be
    avoided, and the rest of what orders it (`_entry`); the rows of its prefill rank and of itself at the end. In order:
    all of them have the same best prefill rank."""
    offers = [
        (row in avoided[0], cost + sums[source, target], cost, source, row)
        for source, ours in before.items()
        if (source, target) in sums
        for row, cost in _leading(ours, avoided[0])
    ]
    if not offers:
        return
    again, _, cost, source, source_row = min(offers)
    for place, (row, extra) in enumerate(zip(side.rows.tolist(), side.extra.tolist(), strict=True)):
        if (row in avoided[1]) == shunned:
            total = cost + extra + sums[source, target]
            yield again + shunned, total, cost, source, target, place, source_row, row


def _leading(side: _Side, avoided: frozenset[int]) -> Iterator[tuple[int, float]]:
    """The best row, and the best one that is not to be avoided, with their costs."""
    for row, cost in zip(side.rows.tolist(), side.extra.tolist(), strict=True):
        yield row, cost
        if row not in avoided:
            return
