"""Where images are encoded: image tokens per replica equalised, embeddings that a replica has counted as done.

See encoder.md. Costs are image tokens: missing ones, those that wait before them, and λ · (assigned − least assigned).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.router.balancers.base import EncodedImage, ImageWork
from headrace.router.balancers.embeddings import EmbeddingView
from headrace.router.columns import Columns, Floats
from headrace.router.fleet import Amount, Fleet
from headrace.router.rendezvous import weights
from headrace.router.topology import Candidate, RankId, Role

TOKEN_S = 1e-4
"""Seconds that stand for an image token in the fleet's account of assigned work. Only differences between encoders
count, so that any one rate does."""


@dataclass(frozen=True, slots=True)
class EncoderPolicy:
    """Parameters; encoder.md says what they do."""

    weight: float = 0.05
    """λ: image tokens of new work that a token of difference in assigned work weighs."""
    hit_share: float = 1 / 16
    """What sending an embedding that is there costs, as a part of computing it."""
    entries: int = 4096
    """Embeddings remembered per encoder."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1 or not 0 <= self.hit_share <= 1:
            raise ValueError(f"weight {self.weight} and hit_share {self.hit_share} must be in [0, 1]")


class CachedImages:
    """The encoder balancer. For one thread; time is an argument."""

    def __init__(self, fleet: Fleet, policy: EncoderPolicy | None = None) -> None:
        self._fleet = fleet
        self._policy = policy or EncoderPolicy()
        self._view = EmbeddingView(self._policy.entries)
        self._columns: Columns | None = None
        self._row: dict[RankId, int] = {}

    def order(self, images: Sequence[ImageWork], now: float) -> Iterator[Candidate]:
        """See EncoderBalancer. The second and further ones are put in order only when they are asked for."""
        columns = self._current()
        if not len(columns):
            return
        loads = self._fleet.loads(Role.ENCODER, now)
        missing = self._missing(images, len(columns))
        # An embedding that is there waits for nobody; what is missing waits for the tower's queue.
        waits = np.where(missing > 0, loads.tokens, 0)
        assigned = loads.assigned / TOKEN_S
        cost = np.round(missing + waits + self._policy.weight * (assigned - assigned.min()), 3)
        affinity = images[0].key if images else b""
        tied = np.flatnonzero(cost == cost.min())
        first = int(tied[0] if len(tied) == 1 else tied[weights(affinity, columns.seeds[tied]).argmax()])
        yield columns.candidates[first]
        for row in np.lexsort((~weights(affinity, columns.seeds), cost)):
            if row != first:
                yield columns.candidates[row]

    def sent(self, rank: RankId, request_id: str, images: Sequence[ImageWork], now: float) -> None:
        """See EncoderBalancer."""
        columns = self._current()
        row = self._row.get(rank)
        missing = 0 if row is None else int(self._missing(images, len(columns))[row])
        self._fleet.begin(rank, request_id, self._amount(missing, _distinct(images)), now)
        if row is not None:
            for key in dict.fromkeys(image.key for image in images):
                self._view.sent(rank, key)

    def answered(self, rank: RankId, request_id: str, images: Sequence[EncodedImage], now: float) -> None:
        """See EncoderBalancer."""
        for key, cached in _first_answers(images).items():
            self._view.answered(rank, key, cached)

    def failed(self, rank: RankId, request_id: str, images: Sequence[ImageWork], now: float) -> None:
        """See EncoderBalancer."""
        self._fleet.end(rank, request_id, now, Amount())
        for key in dict.fromkeys(image.key for image in images):
            self._view.failed(rank, key)

    def ended(self, rank: RankId, request_id: str, images: Sequence[EncodedImage], now: float) -> None:
        """See EncoderBalancer."""
        tokens = {image.key: image.tokens for image in images}
        computed = sum(tokens[key] for key, cached in _first_answers(images).items() if not cached)
        self._fleet.end(rank, request_id, now, self._amount(computed, tokens))

    @property
    def remembered(self) -> int:
        """Pairs of embedding and encoder that are believed in."""
        return len(self._view)

    def _amount(self, missing: int, tokens: dict[bytes, int]) -> Amount:
        """Of `missing` tokens to compute and the rest to send."""
        work = missing + self._policy.hit_share * (sum(tokens.values()) - missing)
        return Amount(tokens=missing, requests=1, seconds=work * TOKEN_S)

    def _missing(self, images: Sequence[ImageWork], ranks: int) -> Floats:
        """Image tokens that each encoder would have to compute, each picture once."""
        tokens = _distinct(images)
        missing = np.full(ranks, float(sum(tokens.values())))
        for key, count in tokens.items():
            for rank in self._view.holders(key):
                missing[self._row[rank]] -= count
        return missing

    def _current(self) -> Columns:
        """The encoders that take work; what is known of others is forgotten when they leave."""
        columns = self._fleet.columns(Role.ENCODER)
        if columns is not self._columns:
            self._columns = columns
            self._row = {candidate.id: row for row, candidate in enumerate(columns.candidates)}
            for rank in self._view:
                if rank not in self._row:
                    self._view.forget(rank)
        return columns


def _distinct(images: Sequence[ImageWork]) -> dict[bytes, int]:
    """Tokens by key: a picture that a request has twice is computed once."""
    return {image.key: image.tokens for image in images}


def _first_answers(images: Sequence[EncodedImage]) -> dict[bytes, bool]:
    """Whether each picture was there before the request. A picture that the request has twice was there at its second
    place in any case."""
    first: dict[bytes, bool] = {}
    for image in images:
        first.setdefault(image.key, image.cached)
    return first
