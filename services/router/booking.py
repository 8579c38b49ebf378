"""Room at a decode rank for one attempt, and what its pair of ranks is counted with meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.router.balancers.base import Pair
from headrace.router.balancers.conditional import computed_at_decode
from headrace.router.fleet import Amount, Fleet
from headrace.services.router.attach import DecodeLink, Feed
from headrace.services.router.cache_feed import Expectation
from headrace.services.router.place import Placed
from headrace.services.runtime.clock import Clock
from headrace.v1 import common_pb2, decode_pb2, prefill_pb2


@dataclass(eq=False)
class Reservation:
    """Room at a decode rank for one attempt."""

    pair: Pair
    link: DecodeLink
    feed: Feed
    response: decode_pb2.ReserveResponse
    seconds: float
    sender: common_pb2.PeerId
    """The prefill process that may write for it."""
    sender_endpoint: str
    """Kept beside the topology, which forgets a frozen process long before that process is dead."""
    sources: tuple[prefill_pb2.PrefixSource, ...] = ()
    """Whose host memory has more of the prefix than the prefill rank."""
    expectation: Expectation | None = None
    """What prefill should find, which it may prove wrong."""
    prefill: prefill_pb2.PrefillReport = field(default_factory=prefill_pb2.PrefillReport)
    """What prefill said at the hand-over; empty before it."""
    handed_over: bool = False
    """`prefill` is there."""
    target_lost: bool = False
    """Prefill says that decode is to blame."""
    prefill_failed: bool = False
    """Prefill has ended the attempt."""
    prefill_gone: bool = False
    """It cannot be reached."""
    begun: bool = False
    """Its events are being followed: whoever does so ends it."""
    transfer_us: int = 0
    """From the last chunk's end until decode had verified all rows."""


class Bookings:
    """The work of attempts in the fleet's accounts, from the choice of a pair to the end of both sides (L22)."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock

    def begin(self, pair: Pair, placed: Placed, attempt: common_pb2.AttemptId) -> None:
        """It counts from the choice on, so that a burst spreads before anybody has answered."""
        now = self._clock.monotonic()
        decode = Amount(tokens=placed.routing.prompt_tokens, requests=placed.routing.choices)
        self._fleet.begin(pair.decode.id, load_key(attempt), decode, now)
        if not computed_at_decode(pair):
            self._fleet.begin(pair.prefill.id, load_key(attempt), pair.prediction.amount, now)

    def end_prefill(self, pair: Pair, attempt: common_pb2.AttemptId, worked: Amount | None = None) -> None:
        """Prefill's side is over. `worked`: what of it was done, where that is known."""
        if not computed_at_decode(pair):
            self._fleet.end(pair.prefill.id, load_key(attempt), self._clock.monotonic(), worked)

    def end(self, pair: Pair, attempt: common_pb2.AttemptId, worked: Amount | None = None) -> None:
        """Both sides are over."""
        self._fleet.end(pair.decode.id, load_key(attempt))
        self.end_prefill(pair, attempt, worked)


def load_key(attempt: common_pb2.AttemptId) -> str:
    """Its name in the accounts."""
    return f"{attempt.request_id}#{attempt.attempt}"
