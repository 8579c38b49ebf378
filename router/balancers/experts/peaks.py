"""The expert balancer: peaks of past steps, made small by local search, as far as the moves pay. See README.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.router.balancers.base import ExpertPlan, Placement, Tokens
from headrace.router.balancers.experts.costs import FULL_MODEL, ONE_NODE, Movement, Nodes
from headrace.router.balancers.experts.eplb import eplb_layer
from headrace.router.balancers.experts.placement import (
    Bools,
    Floats,
    PlacementError,
    arriving,
    check_placement,
    check_tokens,
    holders,
    peaks,
    slots_per_rank,
)
from headrace.router.balancers.experts.search import LayerSearch, Slots


@dataclass(frozen=True, slots=True)
class Sampling:
    """The steps that a plan is tried on, made from the intervals that were counted. A plan fitted to a few steps fits
    their noise; more steps of the same traffic leave less of it."""

    window: int = 1
    """Intervals that make one step. Windows slide by one interval, so that finer intervals give more steps."""
    resampled: int = 0
    """Further steps, each the sum of `window` intervals drawn at random: the same traffic, met in another order."""

    def __post_init__(self) -> None:
        if self.window < 1 or self.resampled < 0:
            raise PlacementError("a window has at least one interval, and resampled steps are 0 or more")

    def steps(self, tokens: Tokens, rng: np.random.Generator) -> Floats:
        """[steps, layers, experts]; fewer intervals than a window make one step."""
        window = min(self.window, len(tokens))
        ends = np.concatenate([np.zeros((1, *tokens.shape[1:]), np.int64), tokens.cumsum(0)])
        sliding = ends[window:] - ends[:-window]
        drawn = tokens[rng.integers(len(tokens), size=(self.resampled, window))].sum(1)
        return np.concatenate([sliding, drawn]).astype(np.float64)


EACH_STEP = Sampling()
"""The very steps that were counted."""


class PeakBalancer:
    """Minimises Σ over steps of the largest rank load, plus what moving and crossing nodes costs.

    Layers are independent. The search begins at the placement that serves, new slots filled, so that what does not gain
    stays where it is; where none serves, or ranks have fewer slots than before, it begins at EPLB's. Deterministic by
    `seed`.
    """

    def __init__(
        self,
        nodes: Nodes = ONE_NODE,
        movement: Movement = FULL_MODEL,
        sampling: Sampling = EACH_STEP,
        *,
        shakes: int = 2,
        seed: int = 0,
    ) -> None:
        self._nodes = nodes
        self._movement = movement
        self._sampling = sampling
        self._shakes = shakes
        self._seed = seed

    def plan(self, tokens: Tokens, ranks: int, replicas: int, current: Placement | None = None) -> ExpertPlan:
        """See ExpertBalancer. Raises PlacementError for sizes that do not fit."""
        check_tokens(tokens)
        _, layers, experts = tokens.shape
        room = slots_per_rank(experts, ranks, replicas)
        self._nodes.check(experts, ranks)
        if current is not None:
            check_placement(current, layers, experts, ranks, distinct=False)
        steps = self._sampling.steps(tokens, np.random.default_rng(self._seed))
        placed = [
            self._layer(steps[:, layer], ranks, room, None if current is None else current[layer], layer)
            for layer in range(layers)
        ]
        placement = np.stack(placed).astype(np.int32)
        check_placement(placement, layers, experts, ranks)
        before = placement if current is None else current
        return ExpertPlan(
            placement,
            arriving(before, placement, experts, ranks),
            float(peaks(tokens, before, ranks).sum() / len(tokens)),
            float(peaks(tokens, placement, ranks).sum() / len(tokens)),
        )

    def _layer(self, loads: Floats, ranks: int, room: int, current: Slots | None, layer: int) -> Slots:
        experts = loads.shape[1]
        slots, entry = None, np.zeros((ranks, experts))
        if current is not None:
            entry = self._movement.entry(current, experts, ranks, self._nodes, len(loads))
            slots = _filled(loads, current, ranks, room)
        if slots is None:
            slots = self._eplb(loads, ranks, room)
        # Groups are at home where the placement that serves has them; without one, where EPLB packs them.
        away = self._nodes.away(slots if current is None else current, experts, ranks)
        search = LayerSearch(loads, slots, ranks, entry, away, self._nodes.crossing)
        search.improve(self._shakes, np.random.default_rng((self._seed, layer)))
        return search.slots

    def _eplb(self, loads: Floats, ranks: int, room: int) -> Slots:
        experts = loads.shape[1]
        groups, nodes = (self._nodes.groups, self._nodes.nodes) if self._nodes.by_group else (1, 1)
        slots = eplb_layer(loads.sum(0), ranks, ranks * room - experts, groups, nodes)
        return _distinct(slots, loads, ranks, room)


def _distinct(slots: Slots, loads: Floats, ranks: int, room: int) -> Slots:
    """The placement with an expert's second replica on a rank taken out, and the gaps filled again."""
    experts = loads.shape[1]
    held = holders(slots, experts, ranks)
    if held.sum() == len(slots):
        return slots
    return _fill(held, loads, room)


def _filled(loads: Floats, current: Slots, ranks: int, room: int) -> Slots | None:
    """What serves now, with replicas in slots that are new. None where ranks have fewer slots than now hold experts."""
    held = holders(current, loads.shape[1], ranks)
    return None if held.sum(1).max() > room else _fill(held, loads, room)


def _fill(held: Bools, loads: Floats, room: int) -> Slots:
    """Every rank filled to `room`: the next replica goes to the expert with the largest load per replica, onto the
    least loaded rank that has room and does not hold it."""
    held = held.copy()
    mean = loads.sum(0)
    while held.sum() < len(held) * room:
        copies = held.sum(0)
        open_ranks = np.flatnonzero(held.sum(1) < room)
        each = mean / copies
        possible = np.flatnonzero(~held[open_ranks].all(0))
        expert = possible[np.lexsort((copies[possible], -each[possible]))[0]]
        free = open_ranks[~held[open_ranks, expert]]
        held[free[np.argmin((held[free] * each).sum(1))], expert] = True
    return np.nonzero(held)[1].astype(np.int32)
