"""Where a prompt is computed: new work + λ · (load − least load), under a bound on the time to its first token.

See prefill.md. One pass over columns, so that 1,000 ranks cost little more than 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from headrace.router.balancers.base import Choice, Prediction
from headrace.router.balancers.pending import Pending
from headrace.router.columns import Columns, Flags, Floats, Ints
from headrace.router.cost.loading import LoadingRates, Source
from headrace.router.cost.prefill import PrefillCosts
from headrace.router.fleet import Fleet
from headrace.router.index.base import Blocks, PrefixMatch
from headrace.router.loads import Loads
from headrace.router.rendezvous import weights
from headrace.router.request import RoutingRequest
from headrace.router.topology import Candidate, Role

SAMPLE_TOKENS = 4096.0
"""What a token costs is asked for so many."""
TIE = 1e-3
"""Candidates whose costs differ by less than this share of the request's work are equal: rendezvous decides."""

IDLE = 0.1
"""Part of λ by which the load of an idle rank counts. Nobody waits there, so even a prefix that others could load in
milliseconds is worth staying for; some of it counts all the same, or one rank would take whatever the others are idle
for (L21)."""


@dataclass(frozen=True, slots=True)
class PrefillPolicy:
    """Parameters; prefill.md says what they do."""

    weight: float = 0.02
    """λ: seconds of new work that a second of load difference weighs."""
    objective_s: float | None = None
    """Candidates whose first token would come later than this after now stand behind the others."""
    attention_share: float = 0.0
    """How much of the load is attention compute, brought to the same mean; the rest is seconds of work."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1 or not 0 <= self.attention_share <= 1:
            raise ValueError(f"weight {self.weight} and attention_share {self.attention_share} must be in [0, 1]")


@dataclass(frozen=True, slots=True, eq=False)
class Assessment:
    """What one request would cost at every prefill rank, in the order of `columns`."""

    columns: Columns
    fits: Flags
    cached: Floats
    """Tokens in its device pool."""
    local: Floats
    """Tokens in its device pool or host tier."""
    hit: Floats
    """Cached and loaded tokens."""
    work: Floats
    """Seconds of compute, as its share of full batches on a rank like the others."""
    load: Floats | float
    """Seconds of loading; one number where it is the same everywhere."""
    ttft: Floats
    cost: Floats
    late: Ints | None
    """0: in time; 1: over the objective; 2: over the request's own deadline. None: all are in time."""
    affinity_key: bytes
    """Orders candidates of equal cost."""

    def best(self) -> int | None:
        """The row of the best candidate; None if no rank can hold the request."""
        cost = self.cost
        if self.fits is not self.columns.every:
            if not self.fits.any():
                return None
            cost = np.where(self.fits, cost, math.inf)
        if self.late is not None:
            late = np.where(self.fits, self.late, 3)
            cost = np.where(late == late.min(), cost, math.inf)
        if not len(cost):
            return None
        least = int(cost.argmin())
        tied = (cost <= cost[least] + TIE * self.work[least]).nonzero()[0]
        return least if len(tied) == 1 else int(tied[weights(self.affinity_key, self.columns.seeds[tied]).argmax()])

    def ranked(self) -> Ints:
        """Rows of all candidates that can hold the request, best first."""
        late = self.late if self.late is not None else np.zeros(len(self.cost), np.int64)
        order = np.lexsort((~weights(self.affinity_key, self.columns.seeds), self.cost, late))
        rows: Ints = order[self.fits[order]]
        return rows

    def choice(self, row: int, prompt_tokens: int) -> Choice:
        """One row, as an answer."""
        cached, hit = int(self.cached[row]), int(self.hit[row])
        prediction = Prediction(
            cached_tokens=cached,
            loaded_tokens=hit - cached,
            new_tokens=prompt_tokens - hit,
            compute_s=float(self.work[row]),
            load_s=self.load if isinstance(self.load, float) else float(self.load[row]),
            ttft_s=float(self.ttft[row]),
            shared_tokens=max(0, hit - int(self.local[row])),
        )
        return Choice(self.columns.candidates[row], float(self.cost[row]), prediction)


class NewWork:
    """The prefill balancer."""

    def __init__(
        self,
        fleet: Fleet,
        costs: PrefillCosts,
        rates: LoadingRates,
        policy: PrefillPolicy = PrefillPolicy(),
        pending: Pending | None = None,
    ) -> None:
        """`pending`: remembers what was sent a moment ago; None where the index knows at once (a replay)."""
        self._fleet = fleet
        self.costs = costs
        self.rates = rates
        self.policy = policy
        self.pending = pending

    def order(self, request: RoutingRequest, match: PrefixMatch, now: float) -> Iterator[Choice]:
        """Best first; candidates that can never hold the request are left out."""
        assessment = self.assess(request, match, now)
        first = assessment.best()
        if first is None:
            return
        yield assessment.choice(first, request.prompt_tokens)
        for row in assessment.ranked().tolist():
            if row != first:
                yield assessment.choice(row, request.prompt_tokens)

    def note(self, request: RoutingRequest, rank: Candidate, now: float) -> None:
        """The request goes there: prompts that begin alike know it before the first event tells."""
        number = self._fleet.numbers.get(rank.id)
        if self.pending is not None and number is not None:
            self.pending.note(request.blocks, number, now)

    def clear(self, number: int) -> None:
        """The rank is gone; its number is the next newcomer's."""
        if self.pending is not None:
            self.pending.clear(number)

    def assess(self, request: RoutingRequest, match: PrefixMatch, now: float) -> Assessment:
        """Every candidate at once."""
        columns, loads = self._fleet.columns(Role.PREFILL), self._fleet.loads(Role.PREFILL, now)
        slowness = self.costs.slowness(columns.numbers, now)
        fits = columns.fits(request.prompt_tokens, request.choices)
        cached, local, hit, work, load_s = self._usable(request, match, columns, now)
        assigned = self._assigned(loads, slowness)
        some = assigned if fits is columns.every else assigned[fits]
        token_s = float(self.costs.work(SAMPLE_TOKENS, 0.0)) / SAMPLE_TOKENS
        waiting = np.maximum(loads.queue_s, loads.tokens * token_s)
        # Own work counts as well as the report: whoever says that it is idle may lie (L22).
        idle = (waiting <= 0) & (loads.requests <= 0) & (loads.own <= 0)
        weight = np.where(idle, IDLE * self.policy.weight, self.policy.weight)
        # A slow rank's load weighs more, not the work itself: it gets its smaller share, where a dearer work would let
        # it get nothing until the others are far ahead (1/λ of the difference).
        cost = work + load_s + weight * (assigned - some.min(initial=math.inf))
        ttft = load_s + slowness * (waiting + self.costs.alone(request.prompt_tokens - hit, hit))
        late = self._late(ttft, request.deadline - now)
        return Assessment(columns, fits, cached, local, hit, work, load_s, ttft, cost, late, request.affinity_key)

    def _late(self, ttft: Floats, left_s: float) -> Ints | None:
        objective = math.inf if self.policy.objective_s is None else self.policy.objective_s
        if ttft.max(initial=0.0) <= min(objective, left_s):
            return None
        late = (ttft > objective).astype(np.int64)
        late[ttft > left_s] = 2
        return late

    def _usable(
        self, request: RoutingRequest, match: PrefixMatch, columns: Columns, now: float
    ) -> tuple[Floats, Floats, Floats, Floats, Floats | float]:
        """Tokens in the device pool, with the host tier, and usable in all; work and loading time: whichever of
        computing and loading is less."""
        prompt, block = request.prompt_tokens, columns.block
        device = np.minimum(_at(match.device, columns) * block, prompt).astype(np.float64)
        depths = self.pending.depths(request.blocks, now) if self.pending is not None else {}
        if depths:
            device = np.maximum(device, np.minimum(_at(_column(depths), columns) * block, prompt))
        hit, work = device, self.costs.work(prompt - device, device)
        load_s: Floats | float = 0.0
        local, from_host = device, None
        if match.local is not match.device:
            local = np.maximum(device, np.minimum(_at(match.local, columns) * block, prompt))
            from_host = self.rates.seconds(Source.HOST, local - device)
            hit, work, load_s = self._less(prompt, local, from_host, hit, work, load_s)
        if match.shared or match.mixed is not None:
            reach = np.maximum(local, np.minimum(_at(match.reach(), columns) * block, prompt))
            seconds = self.rates.seconds(Source.SHARED, reach - local)
            seconds = seconds if from_host is None else seconds + from_host
            hit, work, load_s = self._less(prompt, reach, seconds, hit, work, load_s)
        return device, local, hit, work, load_s

    def _less(
        self, prompt: int, tokens: Floats, seconds: Floats, hit: Floats, work: Floats, load_s: Floats | float
    ) -> tuple[Floats, Floats, Floats]:
        """By rank: with `tokens` of the prompt, `seconds` after, if that costs less than what is there."""
        computed = self.costs.work(prompt - tokens, tokens)
        better = computed + seconds < work + load_s
        return np.where(better, tokens, hit), np.where(better, computed, work), np.where(better, seconds, load_s)

    def _assigned(self, loads: Loads, slowness: Floats) -> Floats:
        """Load of every rank: assigned work, in seconds of its own."""
        share = self.policy.attention_share
        if share == 0:
            return slowness * loads.assigned
        seconds, attention = loads.assigned, loads.assigned_attention
        total = float(attention.sum())
        if total <= 0:
            return slowness * seconds
        return slowness * ((1 - share) * seconds + (share * float(seconds.sum()) / total) * attention)


def _column(depths: Mapping[int, int]) -> Blocks:
    """Blocks by rank number; 0 for the numbers between."""
    column = np.zeros(max(depths) + 1, np.int32)
    column[np.fromiter(depths.keys(), np.int64, len(depths))] = np.fromiter(depths.values(), np.int32, len(depths))
    return column


def _at(blocks: Blocks, columns: Columns) -> Blocks:
    """Entries of a match's column; ranks that joined after it was asked hold nothing."""
    last = columns.index.stop if isinstance(columns.index, slice) else int(columns.numbers.max(initial=-1)) + 1
    missing = last - len(blocks)
    known = blocks if missing <= 0 else np.concatenate((blocks, np.zeros(missing, blocks.dtype)))
    return known[columns.index]
