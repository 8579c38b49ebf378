"""The routers that a simulation can have, by name."""

from __future__ import annotations

from collections.abc import Callable

from headrace.router.cost.prefill import PrefillBatch
from headrace.router.simulate.headrace_router import HeadraceRouter, make_index
from headrace.router.simulate.peers import (
    DynamoDecode,
    DynamoPrefill,
    FewestRequests,
    LeastTokens,
    PeerRouter,
    RoundRobin,
    Sticky,
)
from headrace.router.simulate.routing import SimRouter
from headrace.router.simulate.spec import Cluster

MakeRouter = Callable[[Cluster, int], SimRouter]
OURS = "headrace"


def _sticky(cluster: Cluster) -> Sticky:
    full = cluster.prefill.seconds(PrefillBatch(4.0, cluster.batch_tokens))
    return Sticky(cluster.batch_tokens / full)


POLICIES: dict[str, MakeRouter] = {
    OURS: lambda cluster, block_tokens: HeadraceRouter(cluster, block_tokens),
    "lambda_1": lambda cluster, block_tokens: HeadraceRouter(cluster, block_tokens, weight=1.0),
    "dynamo": lambda cluster, block_tokens: PeerRouter(make_index(), DynamoPrefill(), DynamoDecode(), block_tokens),
    "sticky": lambda cluster, block_tokens: PeerRouter(make_index(), _sticky(cluster), FewestRequests(), block_tokens),
    "least_loaded": lambda cluster, block_tokens: PeerRouter(None, LeastTokens(), FewestRequests(), block_tokens),
    "round_robin": lambda cluster, block_tokens: PeerRouter(None, RoundRobin(), RoundRobin(), block_tokens),
}
"""Given the cluster and the tokens of a block."""

SAME_DECODE = {"lambda_1": OURS, "sticky": "least_loaded"}
"""Policies that differ from another one at prefill only, so that its decode figure is theirs."""
