"""The balancers of this router as its settings say, and what they learn from the workers' reports."""

from __future__ import annotations

from headrace.router.balancers.base import Prediction
from headrace.router.balancers.conditional import Conditional, ConditionalPolicy
from headrace.router.balancers.decode import DecodePolicy, Joint
from headrace.router.balancers.link import GIGABIT, Links
from headrace.router.balancers.pair import JointPair, PairPolicy
from headrace.router.balancers.pending import Pending
from headrace.router.balancers.prefill import NewWork, PrefillPolicy
from headrace.router.cost.decode import DecodeCost
from headrace.router.cost.loading import LoadingRates, Source
from headrace.router.cost.prefill import PrefillBatch, PrefillCost
from headrace.router.cost.replica_steps import ReplicaSteps
from headrace.router.fleet import Amount, Fleet
from headrace.router.native.build import NativeRouter
from headrace.router.native.pair import NativePair
from headrace.router.topology import RankId, Role
from headrace.services.router.settings import BalanceSection
from headrace.v1 import common_pb2, prefill_pb2

DECODE_ROWS = 8
"""A step with more tokens per sequence than this computes prompts too, and says nothing of decode alone."""


class Balance:
    """Costs and balancers over one fleet."""

    def __init__(self, fleet: Fleet, settings: BalanceSection, native: NativeRouter | None = None) -> None:
        """`native`: finds the first pair of each request; None: Python does."""
        self._fleet = fleet
        self.prefill_cost = PrefillCost()
        self.decode_cost = DecodeCost()
        self._decode_steps = ReplicaSteps(self.decode_cost)
        self.rates = LoadingRates()
        self._steps: dict[RankId, int] = {}
        prefill = PrefillPolicy(
            weight=settings.weight,
            objective_s=_seconds(settings.first_token_objective_ms),
            attention_share=settings.attention_share,
        )
        self.decode = Joint(fleet, self.decode_cost, DecodePolicy(objective_s=_seconds(settings.token_objective_ms)))
        self.conditional = Conditional(fleet, self.decode, ConditionalPolicy(settings.compute_at_decode_tokens))
        balancer = NewWork(fleet, self.prefill_cost, self.rates, prefill, Pending())
        self.pairs = JointPair(
            fleet,
            balancer,
            self.decode,
            PairPolicy(neighbours=settings.neighbours),
            Links(bytes_per_s=settings.link_gbits * GIGABIT),
            None if native is None else NativePair(native, fleet, balancer, self.decode),
        )

    def learn(self, rank: RankId, load: common_pb2.LoadReport, now: float) -> None:
        """What the rank's last step took, once per step."""
        self.conditional.told(rank, load.prompt_budget)
        known = self._fleet.known(rank)
        if known is None:
            return
        number, candidate = known
        if load.step > self._steps.get(rank, 0) and load.step_us and load.step_tokens:
            self._steps[rank] = load.step
            self._learn_step(rank, number, candidate.role, load, now)
        if candidate.role is Role.DECODE and not load.running_requests:
            self._decode_steps.idle(rank)

    def _learn_step(self, rank: RankId, number: int, role: Role, load: common_pb2.LoadReport, now: float) -> None:
        seconds = load.step_us / 1e6
        if role is Role.PREFILL:
            context, tokens = load.step_context_tokens, load.step_tokens
            batch = PrefillBatch(
                load.step_requests,
                tokens,
                context,
                float(context > 0),
                context / (context + tokens),
                float(load.step_pairs),
            )
            self.prefill_cost.observe(number, batch, seconds, now)
        elif role is Role.DECODE and load.step_tokens <= DECODE_ROWS * load.step_requests:
            kv_tokens = load.step_context_tokens + load.step_tokens
            self._decode_steps.told(rank, number, load.step_requests, kv_tokens, seconds, now)

    def finished(self, completion_tokens: int, choices: int) -> None:
        """A request ended after so many tokens over its choices."""
        self.decode.finished(completion_tokens // max(1, choices))

    def slowness(self, now: float) -> dict[tuple[str, ...], float]:
        """By replica and rank, for the metrics page."""
        costs = ((Role.PREFILL, self.prefill_cost), (Role.DECODE, self.decode_cost))
        return {
            (rank.id.replica_id, str(rank.id.rank)): factor
            for role, cost in costs
            for rank, factor in zip(
                self._fleet.candidates(role),
                cost.slowness(self._fleet.columns(role).numbers, now).tolist(),
                strict=True,
            )
        }

    def worked(self, expected: Prediction, report: prefill_pb2.PrefillReport) -> Amount:
        """What a prefill run really was: corrects what was assigned to its rank, and what loading takes."""
        # Where it came from is not told; mostly from where it was expected.
        source = Source.SHARED if 2 * expected.shared_tokens > expected.loaded_tokens else Source.HOST
        self.rates.observe(source, report.loaded_tokens, report.load_us / 1e6)
        hit, new = report.cached_tokens + report.loaded_tokens, report.computed_tokens
        return Amount(new, hit, 1, self.prefill_cost.terms.work(new, hit), new * (hit + new / 2))

    def forget(self, rank: RankId, number: int) -> None:
        """The rank is gone; its number is the next newcomer's."""
        self._steps.pop(rank, None)
        self.prefill_cost.clear(number)
        self._decode_steps.forget(rank, number)
        self.pairs.clear(number)
        self.conditional.clear(number)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
