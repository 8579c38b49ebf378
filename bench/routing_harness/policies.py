"""The policies of the table, ours first."""

from __future__ import annotations

from bench.routing_harness.replay import COSTS, RATES, MakePolicy
from headrace.router.balancers.peers import LeastAssigned, PeerPrefill, RoundRobin, deepest_match
from headrace.router.balancers.prefill import NewWork, PrefillPolicy

OURS = PrefillPolicy()
"""As in the service: its defaults."""


def weighted(weight: float) -> MakePolicy:
    """Ours with another λ."""
    return lambda fleet: NewWork(fleet, COSTS, RATES, PrefillPolicy(weight=weight))


POLICIES: dict[str, MakePolicy] = {
    "headrace": lambda fleet: NewWork(fleet, COSTS, RATES, OURS),
    "round_robin": lambda fleet: PeerPrefill(NewWork(fleet, COSTS, RATES), RoundRobin()),
    "deepest_match": lambda fleet: PeerPrefill(NewWork(fleet, COSTS, RATES), deepest_match),
    "least_assigned": lambda fleet: PeerPrefill(NewWork(fleet, COSTS, RATES), LeastAssigned(fleet)),
    "lambda_1": weighted(1.0),
    "lambda_0.05": weighted(0.05),
    "lambda_0.02": weighted(0.02),
    "lambda_0.005": weighted(0.005),
    "lambda_0.0002": weighted(0.0002),
}
