"""What a simulation asks of a router, and what it tells it: the points at which the service does the same.

Ranks are numbered by the simulation, per side, in order of joining; a rank that comes back keeps its number there and
is another member to the router (L14).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from headrace.router.cost.prefill import PrefillBatch
from headrace.router.index.base import HolderTier, PrefixIndex
from headrace.router.reports import Report
from headrace.router.simulate.cache import SharedStore
from headrace.router.simulate.request import Attempt, SimRequest
from headrace.router.topology import Role


class SimRouter(Protocol):
    """Ours (`headrace_router.py`) or a peer's policy (`peers.py`)."""

    def use_store(self, store: SharedStore) -> None:
        """There is a store that it may ask what it has."""
        ...

    def join(self, role: Role, rank: int, replica: str, life: int, index: int) -> None:
        """A rank takes work: the `index`-th of its replica."""
        ...

    def leave(self, role: Role, rank: int) -> None:
        """Nothing new goes there; what runs goes on."""
        ...

    def gone(self, role: Role, rank: int) -> None:
        """Seen to be dead, with all that it had."""
        ...

    def report(self, role: Role, rank: int, report: Report, batch: PrefillBatch | None, now: float) -> None:
        """A rank's account of itself; of a prefill rank also the batch of its last step."""
        ...

    def cached(self, rank: int, stored: list[bytes], removed: list[bytes]) -> None:
        """A prefill rank's cache events."""
        ...

    def order(
        self, request: SimRequest, prompt_tokens: int, output_tokens: int, now: float
    ) -> Iterator[tuple[int, int]]:
        """(prefill rank, decode rank), best first; -1 for a side that is not simulated. Raises Rejected."""
        ...

    def accepted(self, attempt: Attempt, now: float) -> None:
        """Decode has promised room, and prefill has the request."""
        ...

    def handed_over(self, attempt: Attempt, now: float) -> None:
        """Prefill is done, and has told what it really did."""
        ...

    def ended(self, attempt: Attempt, now: float) -> None:
        """The attempt is over, wherever it was and however it ended."""
        ...

    @property
    def idle(self) -> bool:
        """Nothing is in flight (L11)."""
        ...


def tell_index(index: PrefixIndex, number: int, stored: list[bytes], removed: list[bytes]) -> None:
    """What a prefill rank's device cache took in and gave up."""
    if stored:
        index.stored(number, HolderTier.DEVICE, stored)
    if removed:
        index.removed(number, HolderTier.DEVICE, removed)
