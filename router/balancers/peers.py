"""Policies of others, beside which ours is measured in replays without time. See peers.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from headrace.router.balancers.base import Choice
from headrace.router.balancers.prefill import Assessment, NewWork
from headrace.router.columns import Floats
from headrace.router.fleet import Fleet
from headrace.router.index.base import PrefixMatch
from headrace.router.request import RoutingRequest
from headrace.router.topology import Role


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
