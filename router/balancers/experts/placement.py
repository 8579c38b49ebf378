"""Placements of experts in physical slots, and what they make of a load.

Tokens: [steps, layers, experts]. Placement: [layers, slots], the logical expert of every slot; the slots of one rank
stand together. Replicas of an expert share its tokens evenly.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.router.balancers.base import Placement, Tokens

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class PlacementError(ValueError):
    """Tokens, placement or sizes do not fit each other; the message says what would."""


def slots_per_rank(experts: int, ranks: int, replicas: int) -> int:
    """Slots of each rank. Raises PlacementError unless they are equal and can all hold different experts."""
    if experts < 1 or ranks < 1 or replicas < 0:
        raise PlacementError(
            f"{experts} experts, {ranks} ranks and {replicas} replicas; at least 1, 1 and 0 are needed"
        )
    slots, rest = divmod(experts + replicas, ranks)
    if rest:
        raise PlacementError(
            f"{experts} experts and {replicas} replicas do not divide among {ranks} ranks; "
            f"use {replicas - rest if rest <= replicas else replicas + ranks - rest} replicas"
        )
    if slots > experts:
        raise PlacementError(
            f"{slots} slots a rank for {experts} experts would hold an expert twice; use fewer replicas"
        )
    return slots


def contiguous(layers: int, experts: int, ranks: int) -> Placement:
    """No replicas, experts in order: what serves before the first plan."""
    slots_per_rank(experts, ranks, 0)
    return np.tile(np.arange(experts, dtype=np.int32), (layers, 1))


def check_tokens(tokens: Tokens) -> None:
    """Raises PlacementError unless these are counts [steps, layers, experts], one step at least."""
    if tokens.ndim != 3 or 0 in tokens.shape:
        raise PlacementError(f"tokens of shape {tokens.shape}; [steps, layers, experts], none of them 0, is needed")
    if not np.issubdtype(tokens.dtype, np.integer) or tokens.min() < 0:
        raise PlacementError("tokens are counts: integers, 0 or more")


def check_placement(placement: Placement, layers: int, experts: int, ranks: int, *, distinct: bool = True) -> None:
    """Raises PlacementError unless every expert has a slot in every layer and, if `distinct`, none two on one rank."""
    if placement.ndim != 2 or placement.shape[0] != layers or placement.shape[1] % ranks:
        raise PlacementError(
            f"a placement of shape {placement.shape}; [{layers}, slots] with slots a multiple of {ranks} is needed"
        )
    if placement.min() < 0 or placement.max() >= experts:
        raise PlacementError(f"a slot names an expert outside 0 to {experts - 1}")
    for layer, experts_of in enumerate(placement):
        missing = np.flatnonzero(np.bincount(experts_of, minlength=experts) == 0)
        if len(missing):
            raise PlacementError(f"layer {layer}: expert {missing[0]} has no slot")
        if distinct and holders(experts_of, experts, ranks).sum() != len(experts_of):
            raise PlacementError(f"layer {layer}: a rank holds an expert twice")


def holders(slots: Placement, experts: int, ranks: int) -> Bools:
    """[ranks, experts]: who holds what, from the slots of one layer."""
    held = np.zeros((ranks, experts), np.bool_)
    held[np.arange(len(slots)) // (len(slots) // ranks), slots] = True
    return held


def rank_loads(tokens: Tokens, placement: Placement, ranks: int) -> Floats:
    """Tokens that each rank receives: [steps, layers, ranks]."""
    steps, layers, experts = tokens.shape
    loads = np.empty((steps, layers, ranks))
    for layer, slots in enumerate(placement):
        shares = tokens[:, layer] / np.maximum(np.bincount(slots, minlength=experts), 1)
        loads[:, layer] = shares[:, slots].reshape(steps, ranks, -1).sum(2)
    return loads


def balancedness(tokens: Tokens, placement: Placement, ranks: int) -> float:
    """Mean over layers and steps of mean ÷ largest rank load; 1 is perfect. Nobody waits in a step without tokens: 1
    (L20: zero traffic is data, not NaN)."""
    loads = rank_loads(tokens, placement, ranks)
    largest = loads.max(2)
    ratio = np.divide(loads.mean(2), largest, out=np.ones_like(largest), where=largest > 0)
    return float(ratio.mean())


def peaks(tokens: Tokens, placement: Placement, ranks: int) -> Floats:
    """Σ over steps of the largest rank load, by layer: what a plan makes small."""
    return np.asarray(rank_loads(tokens, placement, ranks).max(2).sum(0), np.float64)


def arriving(current: Placement, placement: Placement, experts: int, ranks: int) -> Bools:
    """[layers, ranks, experts]: weights that have to be brought there. Those of an expert that its rank has already, in
    whatever slot, stay where they are."""
    return np.stack(
        [
            holders(new, experts, ranks) & ~holders(old, experts, ranks)
            for old, new in zip(current, placement, strict=True)
        ]
    )


def moves(current: Placement, placement: Placement, experts: int, ranks: int) -> int:
    """Slots whose expert was not on their rank before, over all layers. An expert's second slot on one rank is a move
    too: a plan that has it needs the memory filled."""
    count = 0
    for old, new in zip(current, placement, strict=True):
        kept = holders(new, experts, ranks) & holders(old, experts, ranks)
        count += len(new) - int(kept.sum())
    return count
