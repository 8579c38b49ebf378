"""Which prompts decode computes by itself. See conditional.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.router.balancers.base import Pair, Prediction
from headrace.router.balancers.decode import Joint
from headrace.router.columns import Ints
from headrace.router.fleet import Fleet
from headrace.router.index.base import PrefixMatch
from headrace.router.request import RoutingRequest
from headrace.router.topology import Candidate, RankId


@dataclass(frozen=True, slots=True)
class ConditionalPolicy:
    """Parameters; conditional.md says what they do."""

    most_tokens: int = 0
    """Uncached tokens of a prompt that decode computes at most; 0: none, every prompt goes to prefill."""
    slack: float = 0.05
    """A rank whose steps would be slower than the fastest rank's by more than this share takes none: a prefix that lies
    there is no reason to fill it up (L21)."""

    def __post_init__(self) -> None:
        if self.most_tokens < 0 or self.slack < 0:
            raise ValueError("most_tokens and slack must not be negative")


class Conditional:
    """Decode ranks that may compute a prompt, out of what they hold, how full they are and what a step has room for."""

    def __init__(self, fleet: Fleet, decode: Joint, policy: ConditionalPolicy = ConditionalPolicy()) -> None:
        self._fleet = fleet
        self._decode = decode
        self._policy = policy
        self._budget: dict[int, int] = {}
        """By rank number: what its last report said, less what was sent since."""

    def told(self, rank: RankId, budget: int) -> None:
        """Prompt tokens that a step of the rank has room for beside what runs, as it reports."""
        number = self._fleet.numbers.get(rank)
        if number is not None:
            self._budget[number] = budget

    def clear(self, number: int) -> None:
        """The rank is gone; its number is the next newcomer's."""
        self._budget.pop(number, None)

    def order(self, request: RoutingRequest, match: PrefixMatch, now: float) -> list[Pair]:
        """Pairs of a decode rank with itself, the one that has least to compute first; empty when the prompt goes to
        prefill. Raises Rejected like the decode balancer."""
        if not self._policy.most_tokens or request.image_tokens:
            return []
        projection = self._decode.project(request, now, now)
        columns = projection.columns
        if not projection.fits.any():
            return []
        cached = self._cached(request, match, columns.numbers, columns.block_tokens)
        uncached = request.prompt_tokens - cached
        budget = np.fromiter((self._budget.get(number, 0) for number in columns.numbers.tolist()), np.int64)
        allowed = projection.fits & ~projection.full & (uncached <= np.minimum(budget, self._policy.most_tokens))
        if not allowed.any():
            return []
        self._decode.check(projection, request, now)
        fastest = float(projection.pace[projection.fits].min())
        allowed &= projection.pace <= (1 + self._policy.slack) * fastest
        place = np.empty(len(columns), np.int64)
        ranked = projection.ranked()
        place[ranked] = np.arange(len(ranked))
        rows = allowed.nonzero()[0]
        rows = rows[np.lexsort((place[rows], uncached[rows]))]
        return [_pair(columns.candidates[row], int(cached[row]), int(uncached[row])) for row in rows.tolist()]

    def chosen(self, pair: Pair) -> None:
        """The rank has taken it: the budget of its steps is smaller until it says otherwise."""
        number = self._fleet.numbers.get(pair.decode.id)
        if number is not None:
            self._budget[number] = self._budget.get(number, 0) - pair.prediction.new_tokens

    def _cached(self, request: RoutingRequest, match: PrefixMatch, numbers: Ints, block_tokens: Ints) -> Ints:
        """Tokens of the prompt that each rank has in its device pool: decode loads from nowhere else."""
        device = np.zeros(len(numbers), np.int64)
        known = numbers < len(match.device)
        device[known] = match.device[numbers[known]]
        limit = min(request.usable_tokens, request.prompt_tokens - 1)
        cached: Ints = np.minimum(device * block_tokens, limit)
        return cached


def computed_at_decode(pair: Pair) -> bool:
    """Whether the pair is one rank that does both."""
    return pair.prefill.id == pair.decode.id


def _pair(rank: Candidate, cached: int, uncached: int) -> Pair:
    return Pair(rank, rank, Prediction(cached, 0, uncached, compute_s=0.0, load_s=0.0, ttft_s=0.0))
