"""Where a request lives after its prefill: KV tokens and requests together, projected to the moment it arrives.

See decode.md. The ranks of a replica step together, so the fullest one sets the pace of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.router.balancers.base import Rejected
from headrace.router.balancers.probes import Probes
from headrace.router.columns import Columns, Flags, Floats, Ints
from headrace.router.cost.decode import DecodeCosts
from headrace.router.fleet import Fleet
from headrace.router.loads import Loads
from headrace.router.rendezvous import weights
from headrace.router.request import RoutingRequest
from headrace.router.topology import Candidate, Role


@dataclass(frozen=True, slots=True)
class DecodePolicy:
    """Parameters; decode.md says what they do."""

    objective_s: float | None = None
    """Longest time per token that running requests are promised; None: nobody is rejected for it."""
    usual_tokens: float = 350.0
    """Tokens that a choice generates until answers have been seen."""
    full: float = 0.98
    """Ranks whose KV memory or slots would be fuller than this share stand behind the others."""
    longest_retry_s: float = 60.0

    def __post_init__(self) -> None:
        if self.objective_s is not None and self.objective_s <= 0:
            raise ValueError(f"objective_s {self.objective_s} must be positive")
        if self.usual_tokens < 1 or not 0 < self.full <= 1:
            raise ValueError(f"usual_tokens {self.usual_tokens} or full {self.full} out of range")


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Every decode rank with the request, at the moment its first token arrives."""

    columns: Columns
    fits: Flags
    requests: Floats
    step: Floats
    """Seconds of a step of the rank."""
    pace: Floats
    """Seconds of a step of its replica: of the slowest of its ranks."""
    full: Flags
    affinity_key: bytes
    probe: int | None = None
    """A row that goes first although it is slow (probes.py)."""

    def best(self) -> int | None:
        """The row that `ranked` begins with; None if no rank can hold the request."""
        if self.probe is not None:
            return self.probe
        allowed = self.fits & ~self.full
        if not allowed.any():
            allowed = self.fits
            if not allowed.any():
                return None
        pace = np.where(allowed, self.pace, math.inf)
        rows = (pace == pace.min()).nonzero()[0]
        if len(rows) > 1:
            steps = self.step[rows]
            rows = rows[steps == steps.min()]
        return int(rows[0] if len(rows) == 1 else rows[weights(self.affinity_key, self.columns.seeds[rows]).argmax()])

    def ranked(self) -> Ints:
        """Rows that can hold the request, best first."""
        tie = ~weights(self.affinity_key, self.columns.seeds)
        order = np.lexsort((tie, self.step, self.pace, self.full))
        rows: Ints = order[self.fits[order]]
        return rows if self.probe is None else np.concatenate(([self.probe], rows[rows != self.probe]))


class Joint:
    """The decode balancer."""

    def __init__(self, fleet: Fleet, costs: DecodeCosts, policy: DecodePolicy = DecodePolicy()) -> None:
        self._fleet = fleet
        self.costs = costs
        self.policy = policy
        self._usual = policy.usual_tokens
        self._probes = Probes()

    def finished(self, tokens: int) -> None:
        """A choice ended after so many tokens: the usual number follows."""
        self._usual += 0.01 * (min(max(tokens, 1), 100 * self.policy.usual_tokens) - self._usual)

    @property
    def usual_tokens(self) -> float:
        """Tokens that a choice generates, as of late."""
        return self._usual

    def order(self, request: RoutingRequest, arrives: float, now: float) -> Iterator[Candidate]:
        """Best first. Raises Rejected (L12), at the call and not at the first `next`."""
        projection = self.project(request, arrives, now, probe=self.probe(now))
        self.check(projection, request, now)
        return (projection.columns.candidates[row] for row in projection.ranked().tolist())

    def probe(self, now: float) -> int | None:
        """Asked once per request that is sent: the row of a slow rank that it should try, for `project` (probes.py)."""
        if not self._probes.due():
            return None
        columns = self._fleet.columns(Role.DECODE)
        slowness = self.costs.slowness(columns.numbers, now)
        if slowness.max(initial=1.0) <= 1.0:
            return None
        return self._probes.take(columns.numbers, slowness, self._fleet.loads(Role.DECODE, now).own, now)

    def clear(self, number: int) -> None:
        """The rank is gone; its number is the next newcomer's."""
        self._probes.clear(number)

    def project(self, request: RoutingRequest, arrives: float, now: float, *, probe: int | None = None) -> Projection:
        """Running requests end in the meantime and the others grow; what was admitted before will have arrived."""
        columns, loads = self._fleet.columns(Role.DECODE), self._fleet.loads(Role.DECODE, now)
        slowness = self.costs.slowness(columns.numbers, now)
        requests, kv_tokens = self._later(loads, slowness, max(0.0, arrives - now))
        requests = requests + request.choices
        block = columns.block
        kv_tokens = kv_tokens + block * (-(-(request.prompt_tokens + 1) // block) + request.choices - 1)
        step = slowness * self.costs.step(requests, kv_tokens)
        pace = step
        if columns.replicas < len(columns):
            without = slowness * self.costs.step(requests - request.choices, kv_tokens - request.prompt_tokens)
            slowest = np.zeros(columns.replicas)
            np.maximum.at(slowest, columns.replica, without)
            pace = np.maximum(step, slowest[columns.replica])
        memory = kv_tokens > self.policy.full * columns.rows * block
        slots = (columns.slots > 0) & (requests > columns.slots)
        full = memory | slots
        fits = columns.fits(request.prompt_tokens, request.choices)
        if probe is not None and (full[probe] or not fits[probe]):
            probe = None
        return Projection(columns, fits, requests, step, pace, full, request.affinity_key, probe)

    def check(self, projection: Projection, request: RoutingRequest, now: float) -> None:
        """Raises Rejected when every rank that could hold the request would then miss the objective.

        By predicted load alone: what was admitted and has not arrived counts in full, so admitting stops before the
        load shows and begins again before it has gone. A request that is alone on its replica is never rejected.
        """
        objective = self.policy.objective_s
        if objective is None or not projection.fits.any():
            return
        alone = projection.requests <= request.choices
        if (projection.fits & ((projection.pace <= objective) | alone)).any():
            return
        over = projection.pace[projection.fits]
        best = float(over.min())
        raise Rejected(
            f"every decode rank would need at least {1000 * best:.0f} ms a token, {1000 * objective:.0f} are promised",
            self._retry_after(projection, objective, best),
        )

    def residence_s(self, step_s: float) -> float:
        """How long a choice lives at decode."""
        return max(1e-3, self._usual * step_s)

    def _later(self, loads: Loads, slowness: Floats, ahead_s: float) -> tuple[Floats, Floats]:
        """Requests and KV tokens after `ahead_s`. Ends are taken as memoryless with the mean residence."""
        requests, tokens = loads.requests.astype(np.float64), loads.tokens.astype(np.float64)
        if ahead_s == 0:
            return requests, tokens
        running = np.maximum(0.0, requests - loads.waiting)
        share = np.divide(running, requests, out=np.zeros_like(running), where=requests > 0)
        step = slowness * self.costs.step(requests, tokens)
        left = np.exp(-ahead_s / np.maximum(1e-3, self._usual * step))
        grown = running * left * ahead_s / step
        return requests - running * (1 - left), tokens * (1 - share * (1 - left)) + grown

    def _retry_after(self, projection: Projection, objective: float, best: float) -> float:
        """Until so many have ended that the best rank is at the objective, were nobody else admitted."""
        idle = float(self.costs.step(0.0, 0.0))
        residence = self.residence_s(best)
        if objective <= idle:
            return min(self.policy.longest_retry_s, residence)
        wait = residence * math.log(max(1.0, (best - idle) / (objective - idle)))
        return min(self.policy.longest_retry_s, max(0.05, wait))
