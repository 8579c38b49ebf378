"""EPLB as DeepSeek describes it, on mean loads: the peer that the peak planner is measured against, and its start.

Replicas: the next one always goes to the expert with the largest load per replica. Packing: heaviest first, each into
the least loaded rank that has room. Hierarchical: groups of experts are packed onto nodes first, then each node is
planned alone. The description says nothing of two replicas on one rank: they may meet here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.router.balancers.base import Placement
from headrace.router.balancers.experts.placement import Floats, PlacementError, slots_per_rank

Ints = npt.NDArray[np.int64]


def replicate(loads: Floats, slots: int) -> Ints:
    """Replicas of every expert, `slots` in all. Among experts of equal load per replica (all, where there was no
    traffic, L20) the one with the fewest replicas comes first, then in order."""
    copies = np.ones(len(loads), np.int64)
    for _ in range(slots - len(loads)):
        each = loads / copies
        copies[np.lexsort((copies, -each))[0]] += 1
    return copies


def pack(weights: Floats, bins: int) -> list[list[int]]:
    """Items into `bins` bins of equal room, heaviest first, each into the lightest bin that has room."""
    room = len(weights) // bins
    packed: list[list[int]] = [[] for _ in range(bins)]
    totals = [0.0] * bins
    for item in np.argsort(-weights, kind="stable"):
        target = min((index for index in range(bins) if len(packed[index]) < room), key=totals.__getitem__)
        packed[target].append(int(item))
        totals[target] += float(weights[item])
    return packed


def eplb_layer(loads: Floats, ranks: int, replicas: int, groups: int = 1, nodes: int = 1) -> npt.NDArray[np.int32]:
    """Slots of one layer from one load per expert. Hierarchical with more than one node, whose number divides groups
    and ranks; groups are equal runs of experts. Raises PlacementError for sizes that do not divide."""
    experts = len(loads)
    slots_per_rank(experts, ranks, replicas)
    if nodes > 1 and (groups % nodes or ranks % nodes or experts % groups):
        raise PlacementError(f"{groups} groups of {experts} experts on {nodes} nodes of {ranks} ranks do not divide")
    if nodes == 1:
        return _flat(loads, np.arange(experts), ranks, experts + replicas)
    members = np.arange(experts).reshape(groups, -1)
    placed: list[npt.NDArray[np.int32]] = [
        _flat(loads, members[on_node].ravel(), ranks // nodes, (experts + replicas) // nodes)
        for on_node in pack(loads[members].sum(1), nodes)
    ]
    return np.concatenate(placed).astype(np.int32)


def _flat(loads: Floats, experts: Ints, ranks: int, slots: int) -> npt.NDArray[np.int32]:
    """The given experts on some ranks, without regard to nodes."""
    copies = replicate(loads[experts], slots)
    expert_of = np.repeat(experts, copies).astype(np.int32)
    each = np.repeat(loads[experts] / copies, copies)
    order = np.array(pack(each, ranks)).ravel()
    return np.take(expert_of, order)


def eplb(loads: Floats, ranks: int, replicas: int, groups: int = 1, nodes: int = 1) -> Placement:
    """All layers: loads [layers, experts] → placement [layers, slots]."""
    return np.stack([eplb_layer(layer, ranks, replicas, groups, nodes) for layer in loads])
