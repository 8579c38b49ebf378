"""The interfaces of the four balancers. Pure decisions: time is an argument, nothing is sent or reserved here.

A balancer orders candidates, best first; the caller reserves at the first that accepts (L23) and goes down the list.
The same objects run in the router service and in the simulator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.router.fleet import Amount
from headrace.router.index.base import PrefixMatch
from headrace.router.request import RoutingRequest
from headrace.router.topology import Candidate, RankId


class Rejected(Exception):
    """Overload (L12): whoever took this request now would break its promises to those that run. Come back later."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(f"{reason}; try again in {retry_after_s:.1f} s")
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a prefill rank is expected to do for a request: a hint, which prefill's report corrects."""

    cached_tokens: int
    """In its device pool."""
    loaded_tokens: int
    """From its host tier, a peer or the store."""
    new_tokens: int
    """To be computed; the three add up to the prompt."""
    compute_s: float
    """Seconds of a busy rank that its computing takes: its share of full batches."""
    load_s: float
    ttft_s: float
    """Queue, loading and computing, from now on."""
    shared_tokens: int = 0
    """Of the loaded ones, from the store or a peer."""

    @property
    def hit_tokens(self) -> int:
        return self.cached_tokens + self.loaded_tokens

    @property
    def amount(self) -> Amount:
        """What it adds to its rank's account (`Fleet.begin`)."""
        attention = self.new_tokens * (self.hit_tokens + self.new_tokens / 2)
        return Amount(self.new_tokens, self.hit_tokens, 1, self.compute_s, attention)


@dataclass(frozen=True, slots=True)
class Choice:
    """A prefill rank, and what to expect there."""

    rank: Candidate
    cost: float
    """In seconds of work; lower is better."""
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a request is computed and where it then lives."""

    prefill: Candidate
    decode: Candidate
    prediction: Prediction


class PrefillBalancer(Protocol):
    """New work + λ · load difference, under the request's deadline."""

    def order(self, request: RoutingRequest, match: PrefixMatch, now: float) -> Iterator[Choice]:
        """Best first. Candidates that can never hold the request are left out."""
        ...


class PairBalancer(Protocol):
    """Chooses prefill and decode jointly, inside one data centre or over a link that is paid for."""

    def order(self, request: RoutingRequest, match: PrefixMatch, now: float) -> Iterator[Pair]:
        """Best first, as many as are asked for. Empty when no pair can ever hold the request. Raises Rejected."""
        ...

    def by_decode(
        self, request: RoutingRequest, match: PrefixMatch, now: float, last: Collection[RankId] = ()
    ) -> Iterator[Pair]:
        """The best pair of each decode rank; those with ranks of `last` after the others. Empty and raises as above."""
        ...

    def chosen(self, request: RoutingRequest, pair: Pair, now: float) -> None:
        """That pair has accepted the request."""
        ...


@dataclass(frozen=True, slots=True)
class ImageWork:
    """An image of a request, before an encoder has seen it."""

    key: bytes
    """Of its embedding, per tenant (L25)."""
    tokens: int
    """Expected length of its span."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """What an encoder answered."""

    key: bytes
    tokens: int
    cached: bool
    """It was there, or in the making, before."""


class EncoderBalancer(Protocol):
    """Image tokens per replica; embeddings that a replica has, or is making, count as done.

    The balancer keeps the account itself: every `sent` is followed by `failed`, or by `answered` and later `ended`.
    """

    def order(self, images: Sequence[ImageWork], now: float) -> Iterator[Candidate]:
        """Best first, as many as are asked for."""
        ...

    def sent(self, rank: RankId, request_id: str, images: Sequence[ImageWork], now: float) -> None:
        """The request is on its way there: it counts from now on (L22)."""
        ...

    def answered(self, rank: RankId, request_id: str, images: Sequence[EncodedImage], now: float) -> None:
        """The encoder has taken the images."""
        ...

    def failed(self, rank: RankId, request_id: str, images: Sequence[ImageWork], now: float) -> None:
        """It has not, or nobody knows."""
        ...

    def ended(self, rank: RankId, request_id: str, images: Sequence[EncodedImage], now: float) -> None:
        """Prefill has the embeddings, or they are given back. More than once is no error."""
        ...


Tokens = npt.NDArray[np.int64]
"""Tokens by interval, layer and logical expert: [intervals, layers, experts]."""
Placement = npt.NDArray[np.int32]
"""Logical expert of every physical slot, slots of one rank together: [layers, slots]."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlan:
    """A placement, what it takes to get there and what it is expected to bring."""

    placement: Placement
    arriving: npt.NDArray[np.bool_]
    """[layers, ranks, experts]: weights that have to be brought to a rank before the switch."""
    peak_before: float
    """Tokens at the fullest rank per interval, summed over layers, under the placement that serves now."""
    peak_after: float
    """The same under the new one, on the very tokens that it was made from; on others it is higher."""

    @property
    def moves(self) -> int:
        """Expert-layers to be brought."""
        return int(self.arriving.sum())


class ExpertBalancer(Protocol):
    """Plans where experts and their replicas lie, from tokens per interval."""

    def plan(self, tokens: Tokens, ranks: int, replicas: int, current: Placement | None) -> ExpertPlan:
        """`tokens`: of recent intervals, each a step or an equal part of one. `replicas`: slots per layer beyond one
        per expert, over all ranks; experts and replicas together divide evenly among the ranks. `current`: the
        placement that serves now, with any number of slots per rank; movement from it is part of the cost. None:
        nothing serves yet."""
        ...
