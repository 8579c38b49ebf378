"""The best pair for one request, by decide.h: what router/balancers/pair.py would yield first."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np

from headrace.router.balancers.base import Pair, Prediction
from headrace.router.balancers.decode import Joint
from headrace.router.balancers.prefill import IDLE, SAMPLE_TOKENS, NewWork
from headrace.router.columns import Columns, Flags
from headrace.router.cost.decode import DecodeCost, DecodeCosts
from headrace.router.cost.loading import Source
from headrace.router.cost.prefill import PrefillCost, PrefillCosts
from headrace.router.fleet import Fleet
from headrace.router.index.base import Blocks, PrefixMatch
from headrace.router.loads import Tables
from headrace.router.native import structs
from headrace.router.native.build import NativeRouter
from headrace.router.native.structs import address
from headrace.router.request import RoutingRequest
from headrace.router.topology import Role


class _Side:
    """The ranks of one role as C++ sees them; pointers are set when what they point to is another."""

    def __init__(self, fleet: Fleet, role: Role, costs: PrefillCosts | DecodeCosts) -> None:
        self._fleet = fleet
        self._role = role
        self._costs = costs
        self.ranks = structs.Ranks()
        self.at = ctypes.addressof(self.ranks)
        self.columns: Columns | None = None
        self._slowness: object = None
        self._fits: object = None

    def look(self, request: RoutingRequest, now: float) -> Columns:
        """As of now, and for this request."""
        columns = self._fleet.columns(self._role)
        ranks = self.ranks
        if columns is not self.columns:
            ranks.count = len(columns)
            ranks.numbers, ranks.rows = address(columns.numbers), address(columns.rows)
            ranks.slots, ranks.block_tokens = address(columns.slots), address(columns.block_tokens)
            ranks.replica, ranks.replicas = address(columns.replica), columns.replicas
            ranks.seeds = address(columns.seeds)
            self.columns = columns
        slowness = self._costs.slowness(columns.numbers, now)
        if slowness is not self._slowness:
            ranks.slowness = address(slowness)
            self._slowness = slowness
        fits: Flags = columns.fits(request.prompt_tokens, request.choices)
        if fits is not self._fits:
            ranks.fits = address(fits)
            self._fits = fits
        return columns


class NativePair:
    """For one fleet and one thread; reads the balancers' own costs, rates and policies."""

    def __init__(self, native: NativeRouter, fleet: Fleet, prefill: NewWork, decode: Joint) -> None:
        """Raises TypeError for costs other than PrefillCost and DecodeCost: C++ knows no others."""
        if not isinstance(prefill.costs, PrefillCost) or not isinstance(decode.costs, DecodeCost):
            raise TypeError("the native decision knows PrefillCost and DecodeCost only")
        self._choose = native.choose_pair
        self._fleet = fleet
        self._prefill, self._prefill_cost = prefill, prefill.costs
        self._decode, self._decode_cost = decode, decode.costs
        self._sources = _Side(fleet, Role.PREFILL, prefill.costs)
        self._targets = _Side(fleet, Role.DECODE, decode.costs)
        self._columns = structs.Tables()
        self._tables: Tables | None = None
        self._work, self._step = structs.PrefillTerms(), structs.DecodeTerms()
        self._learned = (-1, -1, -1)
        self._request = structs.Request()
        structures = (self._columns, self._sources.ranks, self._work, self._targets.ranks, self._step, self._request)
        self._arguments = tuple(ctypes.addressof(one) for one in structures)

    def first(self, request: RoutingRequest, match: PrefixMatch, now: float) -> Pair | None:
        """The best pair. None: there is none, or decode's objective is at stake; Python finds out."""
        sources, targets = self._sources.look(request, now), self._targets.look(request, now)
        tables = self._fleet.tables(now)
        if tables is not self._tables:
            for name, column in zip(tables._fields, tables, strict=True):
                setattr(self._columns, name, address(column))
            self._tables = tables
        self._learn()
        device, local, mixed = match.device, match.local, match.mixed
        asked = self._request
        asked.prompt_tokens, asked.choices = request.prompt_tokens, request.choices
        asked.now, asked.oldest = now, now - self._fleet.stale_after_s
        asked.left = request.deadline - now
        asked.affinity = int.from_bytes(hashlib.blake2b(request.affinity_key, digest_size=8).digest(), "little")
        asked.device, asked.known = address(device), len(device)
        asked.local = None if local is device else address(local)
        asked.mixed = None if mixed is None else address(mixed)
        asked.shared = match.shared
        pending = self._prefill.pending
        sent = pending.found(request.blocks, now) if pending is not None else ()
        asked.pendings = 0
        if sent:
            numbers, depths = _sent(sent)
            asked.pendings = len(numbers)
            asked.pending, asked.pending_depths = address(numbers), address(depths)
        self._choose(*self._arguments)
        prefill, decode = asked.prefill, asked.decode
        if prefill < 0 or decode < 0:
            return None
        objective = self._decode.policy.objective_s
        if objective is not None and asked.pace > objective and not asked.alone:
            return None
        cached, hit = int(asked.cached), int(asked.hit)
        prediction = Prediction(
            cached_tokens=cached,
            loaded_tokens=hit - cached,
            new_tokens=request.prompt_tokens - hit,
            compute_s=asked.work,
            load_s=asked.load,
            ttft_s=asked.ttft,
            shared_tokens=max(0, hit - int(asked.local_tokens)),
        )
        return Pair(sources.candidates[prefill], targets.candidates[decode], prediction)

    def _learn(self) -> None:
        """Costs as of the last observations. The usual answer's length moves with every end."""
        self._step.usual_tokens = self._decode.usual_tokens
        rates = self._prefill.rates
        seen = self._prefill_cost.fit.observations, self._decode_cost.fit.observations, rates.observations
        if seen == self._learned:
            return
        self._learned = seen
        work, cost, policy = self._work, self._prefill_cost, self._prefill.policy
        terms = cost.terms
        work.per_new, work.per_hit, work.per_pair = terms.per_new, terms.per_hit, terms.per_pair
        work.grid_s, work.grid_points, work.grid_step = address(cost.grid_s), len(cost.grid_s), cost.grid_step
        work.grid_scale, work.alone_per_new = terms.curve, terms.alone_per_new
        work.alone_per_hit, work.alone_with_hit = cost.hit_ms
        work.alone_scale = terms.curve / 1000
        work.host_delay, work.host_rate = rates.delay(Source.HOST), rates.rate(Source.HOST)
        work.shared_delay, work.shared_rate = rates.delay(Source.SHARED), rates.rate(Source.SHARED)
        work.weight, work.idle_weight = policy.weight, IDLE * policy.weight
        work.attention_share = policy.attention_share
        work.objective = math.inf if policy.objective_s is None else policy.objective_s
        work.sample_token_s = float(cost.work(SAMPLE_TOKENS, 0.0)) / SAMPLE_TOKENS
        curve = self._decode_cost.scaled
        self._step.base, self._step.per_request, self._step.per_token = curve.base, curve.per_request, curve.per_token
        self._step.full = self._decode.policy.full


def _sent(found: Sequence[tuple[int, Collection[int]]]) -> tuple[Blocks, Blocks]:
    """Rank numbers, and how many blocks each will have."""
    counts = [len(numbers) for _, numbers in found]
    of = chain.from_iterable(numbers for _, numbers in found)
    places = np.array([place for place, _ in found], np.int32)
    return np.fromiter(of, np.int32, sum(counts)), np.repeat(places, counts)
