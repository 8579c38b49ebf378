"""Policies of others, beside which ours is measured; in own words, from their public descriptions. See peers.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from headrace.router.balancers.base import Choice, DecodeBalancer, Pair, PrefillBalancer
from headrace.router.balancers.prefill import Assessment, NewWork
from headrace.router.columns import Floats
from headrace.router.fleet import Fleet
from headrace.router.index.base import PrefixMatch
from headrace.router.request import RoutingRequest
from headrace.router.topology import Candidate, Role


class PrefillCostOf(Protocol):
    """What a policy makes of an assessment: lower is better, one value a rank."""

    def __call__(self, assessment: Assessment, request: RoutingRequest, now: float) -> Floats: ...


class PeerPrefill:
    """Orders by another cost what the prefill balancer has assessed; equal costs by the order of ranks."""

    def __init__(self, ours: NewWork, cost: PrefillCostOf) -> None:
        self._ours = ours
        self._cost = cost

    def order(self, request: RoutingRequest, match: PrefixMatch, now: float) -> Iterator[Choice]:
        """Best first."""
        assessment = self._ours.assess(request, match, now)
        cost = self._cost(assessment, request, now)
        for row in np.argsort(cost, kind="stable").tolist():
            if assessment.fits[row]:
                yield assessment.choice(row, request.prompt_tokens)


class RoundRobin:
    """In turn, whatever the load."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, assessment: Assessment, request: RoutingRequest, now: float) -> Floats:
        self._turn += 1
        count = len(assessment.fits)
        turns: Floats = ((np.arange(count) - self._turn) % max(1, count)).astype(np.float64)
        return turns


def deepest_match(assessment: Assessment, request: RoutingRequest, now: float) -> Floats:
    """The longest cached prefix, whatever the load: the classic failure (L21)."""
    return -assessment.hit


class LeastAssigned:
    """Least work as of late, whatever is cached."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __call__(self, assessment: Assessment, request: RoutingRequest, now: float) -> Floats:
        return self._fleet.loads(Role.PREFILL, now).assigned


class Sticky:
    """The best match while its predicted TTFT is at most the best cold one's + `patience_s`, else the least-loaded cold
    rank."""

    def __init__(self, patience_s: float = 2.0) -> None:
        self._patience_s = patience_s

    def __call__(self, assessment: Assessment, request: RoutingRequest, now: float) -> Floats:
        cold = assessment.hit == 0 if (assessment.hit == 0).any() else np.ones(len(assessment.hit), np.bool_)
        cost: Floats = np.where(cold, assessment.ttft, assessment.ttft + 1e6)
        best = int(np.lexsort((assessment.ttft, -assessment.hit))[0])
        if assessment.hit[best] > 0 and assessment.ttft[best] <= assessment.ttft[cold].min() + self._patience_s:
            cost[best] = -1.0
        return cost


class PeerDecode:
    """Orders decode ranks by `requests`, `tokens` or in `turn`."""

    def __init__(self, fleet: Fleet, by: str) -> None:
        if by not in ("requests", "tokens", "turn"):
            raise ValueError(f"decode ranks are ordered by requests, tokens or turn, not by {by!r}")
        self._fleet = fleet
        self._by = by
        self._turn = -1

    def order(self, request: RoutingRequest, arrives: float, now: float) -> Iterator[Candidate]:
        """Best first; nobody is rejected. Tokens: KV after admission (Dynamo's decode blocks)."""
        columns, loads = self._fleet.columns(Role.DECODE), self._fleet.loads(Role.DECODE, now)
        self._turn += 1
        turns = (np.arange(len(columns)) - self._turn) % max(1, len(columns))
        cost = {"requests": loads.requests, "tokens": loads.tokens, "turn": turns}[self._by]
        fits = columns.fits(request.prompt_tokens, request.choices)
        rows = np.argsort(cost, kind="stable").tolist()
        return (columns.candidates[row] for row in rows if fits[row])


class SeparatePair:
    """Prefill and decode each by a balancer of its own; every pair of one data centre, decode varying fastest."""

    def __init__(self, prefill: PrefillBalancer, decode: DecodeBalancer) -> None:
        self._prefill = prefill
        self._decode = decode

    def order(self, request: RoutingRequest, match: PrefixMatch, now: float) -> Iterator[Pair]:
        """Best first. Raises Rejected."""
        targets: list[Candidate] | None = None
        for choice in self._prefill.order(request, match, now):
            if targets is None:
                targets = list(self._decode.order(request, now + choice.prediction.ttft_s, now))
            for target in targets:
                if target.data_centre == choice.rank.data_centre:
                    yield Pair(choice.rank, target, choice.prediction)

    def chosen(self, request: RoutingRequest, pair: Pair, now: float) -> None:
        """Nothing to remember."""
