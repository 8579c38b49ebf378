"""The best pair as C++ finds it, against router/balancers, which say what it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.balancers.base import Rejected
from headrace.router.balancers.decode import DecodePolicy, Joint
from headrace.router.balancers.pair import JointPair
from headrace.router.balancers.pending import Pending
from headrace.router.balancers.prefill import NewWork, PrefillPolicy
from headrace.router.cost.decode import DecodeCost
from headrace.router.cost.loading import LoadingRates, Source
from headrace.router.cost.prefill import FixedPrefillCost, PrefillBatch, PrefillCost
from headrace.router.fleet import Amount, Fleet
from headrace.router.index.base import PrefixMatch
from headrace.router.native.pair import NativePair
from headrace.router.reports import Report
from headrace.router.topology import Role
from tests.router.balancers.fleets import BLOCK, candidate, decodes, fleet_of, match, prefills, request
from tests.router.native.libraries import native_router


class Scene:
    """Two pair balancers over one fleet, costs and rates: Python alone, and C++ first."""

    def __init__(self, chance: np.random.Generator) -> None:
        self.chance = chance
        sources, targets = int(chance.integers(1, 12)), int(chance.integers(1, 6))
        each = int(chance.integers(1, 4))
        rows, slots = int(chance.integers(40, 400)), int(chance.choice([0, 4, 40]))
        self.fleet = fleet_of(
            *prefills(sources),
            *(
                candidate(f"d{index}", Role.DECODE, rank=rank, rows=rows + 20 * rank, slots=slots)
                for index in range(targets)
                for rank in range(each)
            ),
        )
        self.prefill_cost, self.decode_cost, self.rates = PrefillCost(), DecodeCost(), LoadingRates()
        objective = None if chance.random() < 0.5 else float(chance.choice([0.3, 1.0, 5.0]))
        policy = PrefillPolicy(
            weight=float(chance.choice([0.02, 1.0])),
            objective_s=objective,
            attention_share=float(chance.choice([0.0, 0.3])),
        )
        self.pending = Pending()
        self.prefill = NewWork(self.fleet, self.prefill_cost, self.rates, policy, self.pending)
        promised = None if chance.random() < 0.5 else float(chance.choice([0.026, 0.04]))
        self.decode = Joint(self.fleet, self.decode_cost, DecodePolicy(objective_s=promised))
        self.plain = JointPair(self.fleet, self.prefill, self.decode)
        first = NativePair(native_router(), self.fleet, self.prefill, self.decode)
        self.native = JointPair(self.fleet, self.prefill, self.decode, first=first)

    def happen(self, now: float) -> None:
        """Work, reports and observations."""
        chance = self.chance
        for role in (Role.PREFILL, Role.DECODE):
            for rank in self.fleet.candidates(role):
                number = self.fleet.numbers.take(rank.id)
                if chance.random() < 0.6:
                    tokens = int(chance.integers(1, 5000))
                    amount = Amount(tokens, tokens // 2, int(chance.integers(1, 4)), tokens * 1e-4, tokens * 100.0)
                    self.fleet.begin(rank.id, f"{now}", amount, now)
                if chance.random() < 0.4:
                    running = int(chance.integers(0, 5))
                    report = Report(
                        int(chance.integers(0, 3)),
                        running_requests=running,
                        kv_tokens=int(chance.integers(0, 4000)) if role is Role.DECODE else 0,
                        step=int(now * 10),
                    )
                    self.fleet.report(rank.id, report, now)
                if chance.random() < 0.3 and role is Role.PREFILL:
                    self.prefill_cost.observe(number, PrefillBatch(2, 3000, 500, attention=1e6), chance.random(), now)
                elif chance.random() < 0.3:
                    self.decode_cost.observe(number, 4, 10_000, float(chance.random()) / 10, now)
        if chance.random() < 0.5:
            self.rates.observe(Source.SHARED, 1000, float(chance.random()) / 100)
            self.decode.finished(int(chance.integers(1, 900)))

    def matched(self, blocks: int) -> PrefixMatch:
        """Any depths that an index could say, of fewer ranks than there are now and then."""
        chance = self.chance
        ranks = max(1, self.fleet.numbers.size - int(chance.random() < 0.2))
        device = chance.integers(0, blocks + 1, ranks) * (chance.random(ranks) < 0.7)
        local = np.maximum(device, chance.integers(0, blocks + 1, ranks)) if chance.random() < 0.5 else device
        shared = int(chance.integers(0, blocks + 1)) if chance.random() < 0.5 else 0
        mixed = np.maximum(np.maximum(local, shared), chance.integers(0, blocks + 1, ranks))
        own = device.astype(np.int32)
        return PrefixMatch(
            own,
            own if local is device else local.astype(np.int32),
            shared,
            mixed.astype(np.int32) if chance.random() < 0.4 else None,
        )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30))
def test_finds_the_pair_that_the_balancers_find(seed: int) -> None:
    """L21–L23: whatever was sent, reported and learned, C++ and Python order every request alike."""
    scene = Scene(np.random.default_rng(seed))
    for step in range(6):
        now = 1.0 + 3 * step
        scene.happen(now)
        text = "abcdefghijkl"[: int(scene.chance.integers(0, 12))] + "xyz"
        asked = request(
            int(scene.chance.integers(1, 40)) * 100,
            text=text,
            deadline=now + float(scene.chance.choice([0.1, 2.0, 600.0])),
            choices=int(scene.chance.integers(1, 3)),
        )
        found = scene.matched(len(text))
        try:
            expected = list(scene.plain.order(asked, found, now))
        except Rejected:
            with pytest.raises(Rejected):
                scene.native.order(asked, found, now)
            continue
        pairs = list(scene.native.order(asked, found, now))
        assert [(one.prefill, one.decode) for one in pairs] == [(one.prefill, one.decode) for one in expected]
        for one, other in zip(pairs[:1], expected[:1], strict=True):
            mine, theirs = one.prediction, other.prediction
            assert (mine.cached_tokens, mine.loaded_tokens, mine.new_tokens, mine.shared_tokens) == (
                theirs.cached_tokens,
                theirs.loaded_tokens,
                theirs.new_tokens,
                theirs.shared_tokens,
            )
            assert (mine.compute_s, mine.load_s, mine.ttft_s) == pytest.approx(
                (theirs.compute_s, theirs.load_s, theirs.ttft_s), rel=1e-12
            )
            scene.fleet.begin(one.prefill.id, f"r{step}", mine.amount, now)
            scene.native.chosen(asked, one, now)


def test_ranks_that_come_and_go_are_seen() -> None:
    """L14: columns and tables are other arrays after a change of members; C++ looks at those of now."""
    fleet = fleet_of(*prefills(2), *decodes(2))
    prefill, decode = NewWork(fleet, PrefillCost(), LoadingRates()), Joint(fleet, DecodeCost())
    native = NativePair(native_router(), fleet, prefill, decode)
    for round_ in range(40):
        fleet.put(f"late{round_}", "1", [candidate(f"late{round_}", Role.DECODE)])
        for rank in fleet.candidates(Role.DECODE)[:-1]:
            fleet.begin(rank.id, f"{round_}", Amount(1000, requests=5), 0.0)
        pair = native.first(request(), match([0] * (4 + round_)), 0.0)
        best = next(JointPair(fleet, prefill, decode).order(request(), match([0] * (4 + round_)), 0.0))
        assert pair is not None
        assert pair.decode == best.decode
    for round_ in range(39):
        fleet.remove(f"late{round_}", "1")
        pair = native.first(request(), match([0] * 50), 0.0)
        assert pair is not None
        assert pair.decode in fleet.candidates(Role.DECODE)


def test_nobody_can_hold_it() -> None:
    """C++ leaves it to Python, which says what follows."""
    for fleet in (fleet_of(*prefills(1)), fleet_of(*decodes(1)), fleet_of(*prefills(1), *decodes(1, rows=2))):
        prefill, decode = NewWork(fleet, PrefillCost(), LoadingRates()), Joint(fleet, DecodeCost())
        native = NativePair(native_router(), fleet, prefill, decode)
        assert native.first(request(10 * BLOCK), match([0, 0]), 0.0) is None
        assert (
            list(JointPair(fleet, prefill, decode, first=native).order(request(10 * BLOCK), match([0, 0]), 0.0)) == []
        )


def test_refuses_costs_that_it_does_not_know() -> None:
    fleet = Fleet(fleet_of(*prefills(1)).numbers)
    with pytest.raises(TypeError, match="PrefillCost"):
        NativePair(
            native_router(), fleet, NewWork(fleet, FixedPrefillCost(), LoadingRates()), Joint(fleet, DecodeCost())
        )
