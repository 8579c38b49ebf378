"""Policies of others beside ours, in own words and from their public descriptions (spec/balancers.md): the two peers,
and what a router that knows no cache does. Small state of their own: what they have sent and not seen end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.router.cost.prefill import PrefillBatch
from headrace.router.index.base import HolderTier, PrefixIndex
from headrace.router.ranks import RankNumbers
from headrace.router.reports import Report
from headrace.router.simulate.cache import SharedStore
from headrace.router.simulate.request import Attempt, SimRequest
from headrace.router.simulate.routing import tell_index
from headrace.router.topology import RankId, Role

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Sent:
    """Columns of one side by rank: what was sent there and is not over. Exact, since one router sends everything."""

    def __init__(self) -> None:
        self.tokens: Ints = np.zeros(0, np.int64)
        """Prefill: tokens to compute. Decode: KV tokens at admission."""
        self.requests: Ints = np.zeros(0, np.int64)
        self.takes: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.number: Ints = np.zeros(0, np.int64)
        """In the index."""

    def join(self, rank: int, number: int) -> None:
        missing = rank + 1 - len(self.takes)
        if missing > 0:
            self.tokens, self.requests, self.number = (
                np.concatenate((column, np.zeros(missing, np.int64)))
                for column in (self.tokens, self.requests, self.number)
            )
            self.takes = np.concatenate((self.takes, np.zeros(missing, np.bool_)))
        self.takes[rank] = True
        self.number[rank] = number

    def add(self, rank: int, tokens: int, requests: int) -> None:
        self.tokens[rank] += tokens
        self.requests[rank] += requests


class PeerPrefill(Protocol):
    """Cost of every rank for a request; the lowest wins, ties by the lowest number."""

    def costs(self, sent: Sent, prompt_tokens: int, held_blocks: Ints, block_tokens: int) -> Floats: ...


class PeerDecode(Protocol):
    """As PeerPrefill."""

    def costs(self, sent: Sent, prompt_tokens: int, block_tokens: int) -> Floats: ...


class RoundRobin:
    """In turn, whatever the load."""

    def __init__(self) -> None:
        self._turn = -1

    def costs(self, sent: Sent, prompt_tokens: int, *_: object) -> Floats:
        self._turn += 1
        count = len(sent.takes)
        result: Floats = ((np.arange(count) - self._turn) % count).astype(np.float64)
        return result


class LeastTokens:
    """Prefill: fewest prompt tokens that wait, cached or not. Decode: fewest KV tokens."""

    def costs(self, sent: Sent, prompt_tokens: int, *_: object) -> Floats:
        return sent.tokens.astype(np.float64)


class FewestRequests:
    """Decode: fewest running requests."""

    def costs(self, sent: Sent, prompt_tokens: int, block_tokens: int) -> Floats:
        return sent.requests.astype(np.float64)


class DynamoPrefill:
    """(Active prefill tokens + input) ÷ block − overlap blocks."""

    def costs(self, sent: Sent, prompt_tokens: int, held_blocks: Ints, block_tokens: int) -> Floats:
        result: Floats = (sent.tokens + prompt_tokens) / block_tokens - held_blocks
        return result


class DynamoDecode:
    """Decode blocks after admission."""

    def costs(self, sent: Sent, prompt_tokens: int, block_tokens: int) -> Floats:
        result: Floats = (sent.tokens + prompt_tokens) / block_tokens
        return result


@dataclass(frozen=True, slots=True)
class Sticky:
    """The best match while its predicted TTFT is at most that of the best cold rank plus `patience_s`; else the
    least-loaded rank. TTFT is predicted as waiting tokens plus own ones, at the rate of full batches."""

    tokens_per_s: float
    patience_s: float = 2.0

    def costs(self, sent: Sent, prompt_tokens: int, held_blocks: Ints, block_tokens: int) -> Floats:
        ttft: Floats = (sent.tokens + prompt_tokens - held_blocks * block_tokens) / self.tokens_per_s
        cold: Floats = (sent.tokens + prompt_tokens) / self.tokens_per_s
        best_match = np.where(sent.takes, held_blocks, -1)
        if best_match.max(initial=0) > 0:
            candidates = best_match == best_match.max()
            rank = int(np.argmin(np.where(candidates, ttft, np.inf)))
            if ttft[rank] <= cold[sent.takes].min() + self.patience_s:
                cold[rank] = -1.0
        return cold


class PeerRouter:
    """Runs a pair of peer policies on an index of ours."""

    def __init__(self, index: PrefixIndex | None, prefill: PeerPrefill, decode: PeerDecode, block_tokens: int) -> None:
        """`index`: None for policies that know no prefixes."""
        self._index = index
        self._prefill_policy = prefill
        self._decode_policy = decode
        self._block_tokens = block_tokens
        self._numbers = RankNumbers()
        self._sides = {Role.PREFILL: Sent(), Role.DECODE: Sent()}
        self._expected: Ints = np.zeros(0, np.int64)
        """Blocks that the prompt which was last asked about has at each prefill rank."""
        self._ids: dict[tuple[Role, int], RankId] = {}
        self._live: dict[str, tuple[int, int]] = {}
        """(tokens at prefill, tokens at decode) of attempts, 0 where they are over."""

    def use_store(self, store: SharedStore) -> None:
        """They do not ask it: every rank has the same of it."""

    def join(self, role: Role, rank: int, replica: str, life: int, index: int) -> None:
        name = RankId(replica, str(life), index)
        self._ids[role, rank] = name
        self._sides[role].join(rank, self._numbers.take(name))

    def leave(self, role: Role, rank: int) -> None:
        self._sides[role].takes[rank] = False

    def gone(self, role: Role, rank: int) -> None:
        self.leave(role, rank)
        number = self._numbers.release(self._ids.pop((role, rank)))
        if self._index is not None and number is not None:
            self._index.clear(number, HolderTier.DEVICE)

    def report(self, role: Role, rank: int, report: Report, batch: PrefillBatch | None, now: float) -> None:
        """Peers go by what they sent."""

    def cached(self, rank: int, stored: list[bytes], removed: list[bytes]) -> None:
        number = self._numbers.get(self._ids[Role.PREFILL, rank]) if (Role.PREFILL, rank) in self._ids else None
        if self._index is not None and number is not None:
            tell_index(self._index, number, stored, removed)

    def order(
        self, request: SimRequest, prompt_tokens: int, output_tokens: int, now: float
    ) -> Iterator[tuple[int, int]]:
        prefill, decode = self._sides[Role.PREFILL], self._sides[Role.DECODE]
        from_costs = to_costs = None
        if len(prefill.takes):
            self._expected = self._held(request, prompt_tokens)
            from_costs = self._prefill_policy.costs(prefill, prompt_tokens, self._expected, self._block_tokens)
        if len(decode.takes):
            to_costs = self._decode_policy.costs(decode, prompt_tokens, self._block_tokens)
        for target in _cheapest(to_costs, decode):
            for source in _cheapest(from_costs, prefill):
                yield source, target

    def _held(self, request: SimRequest, prompt_tokens: int) -> Ints:
        side = self._sides[Role.PREFILL]
        if self._index is None or not len(request.keys):
            return np.zeros(len(side.takes), np.int64)
        limit = (prompt_tokens - 1) // self._block_tokens
        device = self._index.match(request.keys, None, limit).device
        column = np.zeros(max(len(device), int(side.number.max()) + 1), np.int64)
        column[: len(device)] = device
        held: Ints = column[side.number]
        return held

    def accepted(self, attempt: Attempt, now: float) -> None:
        new = at_decode = 0
        if attempt.decode_rank >= 0:
            at_decode = attempt.prompt_tokens
            self._sides[Role.DECODE].add(attempt.decode_rank, at_decode, 1)
        if attempt.prefill_rank >= 0:
            new = attempt.prompt_tokens - int(self._expected[attempt.prefill_rank]) * self._block_tokens
            self._sides[Role.PREFILL].add(attempt.prefill_rank, new, 1)
        self._live[attempt.key] = (new, at_decode)

    def handed_over(self, attempt: Attempt, now: float) -> None:
        at_prefill, at_decode = self._live[attempt.key]
        self._sides[Role.PREFILL].add(attempt.prefill_rank, -at_prefill, -1)
        self._live[attempt.key] = (0, at_decode)

    def ended(self, attempt: Attempt, now: float) -> None:
        at_prefill, at_decode = self._live.pop(attempt.key)
        if at_prefill:
            self._sides[Role.PREFILL].add(attempt.prefill_rank, -at_prefill, -1)
        if at_decode:
            self._sides[Role.DECODE].add(attempt.decode_rank, -at_decode, -1)

    @property
    def idle(self) -> bool:
        books = all(not side.tokens.any() and not side.requests.any() for side in self._sides.values())
        return books and not self._live


def _cheapest(costs: Floats | None, side: Sent) -> Iterator[int]:
    """Ranks that take work, best first; the others are put in order only when the first one refuses."""
    if costs is None:
        yield -1
        return
    costs = np.where(side.takes, costs, np.inf)
    best = int(costs.argmin())
    if side.takes[best]:
        yield best
    for rank in np.argsort(costs, kind="stable")[: int(side.takes.sum())].tolist():
        if rank != best:
            yield rank
