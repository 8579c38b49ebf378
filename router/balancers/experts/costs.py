"""What moving weights and crossing nodes costs, in the planner's own unit: tokens at the fullest rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.router.balancers.base import Placement
from headrace.router.balancers.experts.placement import Bools, Floats, PlacementError, holders


@dataclass(frozen=True, slots=True)
class Nodes:
    """Which ranks share a node, and what lies best on one."""

    nodes: int = 1
    """Ranks 0 … n − 1 are the first node's, and so on."""
    groups: int = 1
    """Equal runs of experts that a token's routing is limited to, so that a group on one node is reached by crossing
    once (DeepSeek-V3: 8 groups, of which a token uses at most 4)."""
    crossing: float = 0.0
    """Cost of a token that is received off its group's home node, as a part of one at the fullest rank. 0: none."""

    def check(self, experts: int, ranks: int) -> None:
        """Raises PlacementError for sizes that do not divide."""
        if self.nodes < 1 or ranks % self.nodes:
            raise PlacementError(f"{ranks} ranks on {self.nodes} nodes; the number of nodes must divide that of ranks")
        if self.groups < 1 or experts % self.groups or (self.groups > 1 and self.groups % self.nodes):
            raise PlacementError(
                f"{self.groups} groups of {experts} experts on {self.nodes} nodes; groups must divide the experts and "
                "be a multiple of the nodes"
            )
        if not 0 <= self.crossing < np.inf:
            raise PlacementError(f"a crossing cost of {self.crossing}; it is 0 or more")

    def node_of(self, ranks: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Node of every rank."""
        return np.arange(ranks) // (ranks // self.nodes)

    @property
    def by_group(self) -> bool:
        """Groups are packed onto nodes."""
        return self.nodes > 1 and self.groups > 1

    def away(self, home: Placement, experts: int, ranks: int) -> Bools:
        """[ranks, experts]: the rank is not on the node that holds most of the expert's group in `home` (one layer)."""
        if not self.by_group or not self.crossing:
            return np.zeros((ranks, experts), np.bool_)
        held = holders(home, experts, ranks).astype(np.int64)
        by_node = held.reshape(self.nodes, -1, self.groups, experts // self.groups).sum((1, 3))
        home_of_expert = np.repeat(by_node.argmax(0), experts // self.groups)
        return np.asarray(self.node_of(ranks)[:, None] != home_of_expert[None, :], np.bool_)


@dataclass(frozen=True, slots=True)
class Movement:
    """A move of one expert's weights of one layer has to pay for itself while the plan serves."""

    expert_bytes: float = 18.8e6
    """Weights of an expert of one layer; of the full model here (spec: balancers)."""
    inside_bytes_per_s: float = 341e9
    """Between ranks of a node; measured between two H200 for rows gathered into one piece."""
    across_bytes_per_s: float = 50e9
    """Between nodes: a 400 Gbit/s link."""
    seconds_per_token: float = 3e-7
    """What one token more at the fullest rank costs a layer: about 88 MFLOP at 500 TFLOP/s, and 7 KB at 50 GB/s."""
    horizon_steps: float = 10_000.0
    """Steps that the plan serves before the next one; gains count over these."""

    def __post_init__(self) -> None:
        if min(self.inside_bytes_per_s, self.across_bytes_per_s, self.seconds_per_token, self.horizon_steps) <= 0:
            raise PlacementError("bandwidths, seconds per token and horizon must be above 0")
        if self.expert_bytes < 0:
            raise PlacementError("an expert's bytes must be 0 or more")

    def entry(self, current: Placement, experts: int, ranks: int, nodes: Nodes, steps: int) -> Floats:
        """[ranks, experts]: cost of the expert's being on the rank, in tokens at the fullest rank summed over `steps`
        steps: nothing where its weights are, little where its node has them, more elsewhere. `current`: one layer."""
        held = holders(current, experts, ranks)
        by_node: Bools = held.reshape(nodes.nodes, -1, experts).max(1)
        on_node = by_node[nodes.node_of(ranks)]
        inside, across = (self.expert_bytes / speed for speed in (self.inside_bytes_per_s, self.across_bytes_per_s))
        seconds = np.where(held, 0.0, np.where(on_node, inside, across))
        return np.asarray(seconds / self.seconds_per_token * (steps / self.horizon_steps), np.float64)


ONE_NODE = Nodes()
"""All ranks reach each other equally."""
FULL_MODEL = Movement()
"""Experts of DeepSeek-V3's size on Hopper GPUs."""
