"""Our router in a simulation: the very objects of the service (fleet, index, cost model, balancers), called at the same
moments as services/router calls them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

from headrace.compiler import NativeUnavailable
from headrace.router.balancers.base import Pair
from headrace.router.balancers.decode import DecodePolicy, Joint
from headrace.router.balancers.pair import JointPair
from headrace.router.balancers.pending import Pending
from headrace.router.balancers.prefill import NewWork, PrefillPolicy
from headrace.router.cost.decode import DecodeCost
from headrace.router.cost.loading import LoadingRates, Source
from headrace.router.cost.prefill import PrefillBatch, PrefillCost
from headrace.router.cost.replica_steps import ReplicaSteps
from headrace.router.fleet import Amount, Fleet
from headrace.router.index.base import HolderTier, PrefixIndex, StorePrefix, no_match
from headrace.router.index.index import BlockIndex
from headrace.router.native.build import NativeRouter, load_native
from headrace.router.native.pair import NativePair
from headrace.router.ranks import RankNumbers
from headrace.router.reports import Report
from headrace.router.request import RoutingRequest
from headrace.router.simulate.cache import SharedStore
from headrace.router.simulate.request import Attempt, SimRequest
from headrace.router.simulate.routing import tell_index
from headrace.router.simulate.spec import Cluster
from headrace.router.topology import Candidate, RankId, Role

INDEX_BYTES = 1 << 30
DATA_CENTRE = "dc"
NOWHERE = Candidate(RankId("nowhere", "0"), Role.DECODE, DATA_CENTRE, "nowhere", 1 << 40, 0, 1, 1 << 40)
"""Where requests go after prefill when decode is not simulated: so that pairs are chosen as ever."""


@cache
def native_part() -> NativeRouter | None:
    """The C++ part of decisions, as in the service; None where it cannot be had and Python decides the same."""
    try:
        return load_native()
    except NativeUnavailable:
        return None


def make_index() -> PrefixIndex:
    """The index of the service."""
    return BlockIndex(INDEX_BYTES, native_part())


class HeadraceRouter:
    """SimRouter around the balancers."""

    def __init__(
        self,
        cluster: Cluster,
        block_tokens: int,
        *,
        weight: float | None = None,
        objective_s: float | None = None,
    ) -> None:
        """`weight`: λ, None for the default. `objective_s`: bound on the predicted TTFT."""
        self._cluster = cluster
        self._block_tokens = block_tokens
        self._fleet = Fleet(RankNumbers())
        self._index = make_index()
        self._prefill_cost = PrefillCost(batch_tokens=cluster.batch_tokens)
        self._decode_cost = DecodeCost()
        policy = PrefillPolicy() if weight is None else PrefillPolicy(weight=weight)
        self.rates = LoadingRates()
        self._prefill = NewWork(self._fleet, self._prefill_cost, self.rates, policy, Pending())
        self._decode = Joint(self._fleet, self._decode_cost, DecodePolicy())
        native = native_part()
        first = None if native is None else NativePair(native, self._fleet, self._prefill, self._decode)
        self._pair = JointPair(self._fleet, self._prefill, self._decode, first=first)
        if cluster.prefill_ranks and not cluster.decode_ranks:
            self._fleet.put(NOWHERE.id.replica_id, NOWHERE.id.incarnation, [NOWHERE])
        self._store: SharedStore | None = None
        self._ranks: dict[RankId, int] = {}
        self._ids: dict[tuple[Role, int], RankId] = {}
        self._replicas: dict[tuple[str, int], dict[int, Candidate]] = {}
        self._learned: dict[int, int] = {}
        """Last step of each prefill rank that the cost model has seen."""
        self._steps = ReplicaSteps(self._decode_cost)
        self._offers: dict[tuple[int, int], Pair | None] = {}
        """What was last offered, by ranks."""
        self._asked: RoutingRequest | None = None
        self._offered: dict[str, Pair | None] = {}
        """By attempts in flight."""

    # --- members and what they tell ----------------------------------------------------------------------------

    def use_store(self, store: SharedStore) -> None:
        self._store = store

    def join(self, role: Role, rank: int, replica: str, life: int, index: int) -> None:
        cluster = self._cluster
        name = RankId(replica, str(life), index)
        decode = role is Role.DECODE
        candidate = Candidate(
            id=name,
            role=role,
            data_centre=DATA_CENTRE,
            host=replica,
            rows=cluster.kv_tokens // self._block_tokens,
            slots=cluster.slots if decode else 0,
            block_tokens=self._block_tokens,
            context_tokens=cluster.context_tokens,
        )
        self._ranks[name], self._ids[role, rank] = rank, name
        members = self._replicas.setdefault((replica, life), {})
        members[index] = candidate
        self._fleet.put(replica, str(life), [members[number] for number in sorted(members)])

    def leave(self, role: Role, rank: int) -> None:
        name = self._ids[role, rank]
        self._fleet.remove(name.replica_id, name.incarnation)

    def gone(self, role: Role, rank: int) -> None:
        name = self._ids.pop((role, rank))
        del self._ranks[name]
        self._replicas.pop((name.replica_id, int(name.incarnation)), None)
        number = self._fleet.forget(name)
        if number is not None:
            self._index.clear(number, HolderTier.DEVICE | HolderTier.HOST)
            self._learned.pop(number, None)
            self._prefill_cost.clear(number)
            self._steps.forget(name, number)
            self._pair.clear(number)

    def report(self, role: Role, rank: int, report: Report, batch: PrefillBatch | None, now: float) -> None:
        name = self._ids.get((role, rank))
        if name is None or not self._fleet.report(name, report, now):
            return
        if role is Role.DECODE:
            number = self._fleet.numbers.get(name)
            if number is not None:
                self._steps.told(name, number, report.running_requests, report.kv_tokens, report.step_s, now)
        elif batch is not None:
            self._learn_batch(name, report, batch, now)

    def _learn_batch(self, name: RankId, report: Report, batch: PrefillBatch, now: float) -> None:
        """Once per batch."""
        number = self._fleet.numbers.get(name)
        if number is None or self._learned.get(number) == report.step:
            return
        self._learned[number] = report.step
        self._prefill_cost.observe(number, batch, report.step_s, now)

    def cached(self, rank: int, stored: list[bytes], removed: list[bytes]) -> None:
        name = self._ids.get((Role.PREFILL, rank))
        number = None if name is None else self._fleet.numbers.get(name)
        if number is not None:
            tell_index(self._index, number, stored, removed)

    # --- one request -------------------------------------------------------------------------------------------

    def order(
        self, request: SimRequest, prompt_tokens: int, output_tokens: int, now: float
    ) -> Iterator[tuple[int, int]]:
        usable = prompt_tokens - 1
        asked = RoutingRequest(
            request_id=str(request.number),
            prompt_tokens=prompt_tokens,
            max_tokens=output_tokens,
            choices=1,
            image_tokens=0,
            affinity_key=request.keys[0] if request.keys else b"",
            deadline=math.inf,
            blocks=request.keys,
            usable_tokens=usable,
        )
        self._asked = asked
        self._offers.clear()
        if not self._cluster.prefill_ranks:
            for target in self._decode.order(asked, now, now):
                yield self._offer(-1, self._ranks[target.id], None)
            return
        limit = usable // self._block_tokens
        match = no_match(self._fleet.numbers.size)
        if request.keys:
            shared = StorePrefix()
            if self._store is not None:
                shared = StorePrefix(self._store.leading(request.keys, limit, now))
            match = self._index.match(request.keys, None, limit, shared)
        decode = bool(self._cluster.decode_ranks)
        for pair in self._pair.order(asked, match, now):
            yield self._offer(self._ranks[pair.prefill.id], self._ranks[pair.decode.id] if decode else -1, pair)

    def _offer(self, prefill: int, decode: int, offer: Pair | None) -> tuple[int, int]:
        self._offers[prefill, decode] = offer
        return prefill, decode

    def accepted(self, attempt: Attempt, now: float) -> None:
        offer = self._offers[attempt.prefill_rank, attempt.decode_rank]
        self._offered[attempt.key] = offer
        if attempt.decode_rank >= 0:
            amount = Amount(tokens=attempt.prompt_tokens, requests=1)
            self._fleet.begin(self._ids[Role.DECODE, attempt.decode_rank], attempt.key, amount, now)
        if offer is None or self._asked is None:
            return
        self._pair.chosen(self._asked, offer, now)
        self._fleet.begin(offer.prefill.id, attempt.key, offer.prediction.amount, now)

    def handed_over(self, attempt: Attempt, now: float) -> None:
        name = self._ids.get((Role.PREFILL, attempt.prefill_rank))
        if name is None:
            return
        self.rates.observe(Source.SHARED, attempt.loaded_tokens, attempt.ready_at - attempt.submitted_at)
        hit = attempt.hit_tokens
        new = attempt.prompt_tokens - hit
        work = float(self._prefill_cost.work(new, hit))
        self._fleet.end(name, attempt.key, now, Amount(new, hit, 1, work, new * (hit + new / 2)))

    def ended(self, attempt: Attempt, now: float) -> None:
        self._offered.pop(attempt.key, None)
        for role, rank in ((Role.PREFILL, attempt.prefill_rank), (Role.DECODE, attempt.decode_rank)):
            name = self._ids.get((role, rank))
            if name is not None:
                self._fleet.end(name, attempt.key)
        if attempt.request.delivered == attempt.request.output_tokens:
            self._decode.finished(attempt.request.output_tokens)

    @property
    def idle(self) -> bool:
        return self._fleet.idle and not self._offered
