"""Local search over the placement of one layer: swaps of two slots, and a replica of one expert for another's.

The objective is Σ over steps of the largest rank load, plus what lies badly (moves, tokens off their home node). All
swaps of a rank that is the fullest in some step are judged at once, in one array expression; the best one is taken
while it gains. Only such a rank can lower the objective, so nothing is missed by leaving the others out. Where no swap
gains, a replica may be given to another expert; where that does not either, the layer has reached its optimum among
neighbours, from which `improve` shakes it a few times and keeps the best.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.router.balancers.experts.placement import Bools, Floats, holders

Slots = npt.NDArray[np.int32]
GAIN = 1e-5
"""Least relative gain of a step: below it lies the rounding of float32, in which loads are held."""
TRIES = 64
"""Draws of a random swap before it is given up: nearly all are allowed unless ranks hold nearly everything."""


class LayerSearch:
    """One layer's placement under improvement.

    `loads` [steps, experts]: tokens. `entry` [ranks, experts]: cost of an expert's being there at all. `away` [ranks,
    experts] × `crossing`: cost of each token that it receives there.
    """

    def __init__(self, loads: Floats, slots: Slots, ranks: int, entry: Floats, away: Bools, crossing: float) -> None:
        self._loads = np.ascontiguousarray(loads, np.float32)
        self._steps, self._experts = loads.shape
        self._ranks = ranks
        self._room = len(slots) // ranks
        self._rank_of = np.arange(len(slots)) // self._room
        self._entry = entry
        self._off = away * (crossing * loads.sum(0, dtype=np.float64))[None, :]
        self._set(slots)

    @property
    def slots(self) -> Slots:
        """The placement as it stands."""
        return self._slots.copy()

    @property
    def cost(self) -> float:
        """Σ peaks + entry + crossing, in tokens."""
        return float(self._rank_loads.max(1).sum(dtype=np.float64) + self._lying().sum())

    def improve(self, shakes: int, rng: np.random.Generator) -> float:
        """Descend, then `shakes` times: a few random changes, descend by swaps, keep what is better;
        descend from the best. Returns its cost."""
        best, kept = self._descend(), self.slots
        for _ in range(shakes):
            self._shake(rng)
            cost = self._descend(replace=False)
            if cost < best - GAIN * abs(best):
                best, kept = cost, self.slots
            else:
                self._set(kept)
        return self._descend() if shakes else best

    def _set(self, slots: Slots) -> None:
        self._slots = slots.astype(np.int32, copy=True)
        self._copies = np.bincount(slots, minlength=self._experts)
        self._shares = self._loads / self._copies.astype(np.float32)
        self._slot_loads = self._shares[:, self._slots]
        self._rank_loads = self._slot_loads.reshape(self._steps, self._ranks, self._room).sum(2)
        self._held = holders(slots, self._experts, self._ranks)
        self._lies = self._entry + self._off / self._copies[None, :]

    def _lying(self) -> Floats:
        """Cost of each slot's lying where it lies, peaks apart."""
        return np.asarray(self._lies[self._rank_of, self._slots], np.float64)

    def _descend(self, *, replace: bool = True) -> float:
        cost = self.cost
        while True:
            fullest = np.bincount(self._rank_loads.argmax(1), minlength=self._ranks)
            for rank in np.argsort(-fullest, kind="stable")[: np.count_nonzero(fullest)]:
                swapped, mine, other = self._best_swap(int(rank), cost)
                if swapped < cost - GAIN * abs(cost):
                    self._swap(mine, other)
                    break
            else:
                replaced, slot, expert = self._best_replacement() if replace else (np.inf, 0, 0)
                if not replaced < cost - GAIN * abs(cost):
                    return cost
                slots = self.slots
                slots[slot] = expert
                self._set(slots)
            cost = self.cost

    def _best_swap(self, rank: int, cost: float) -> tuple[float, int, int]:
        """(cost afterwards, slot of the rank, slot elsewhere) of the best swap; infinite cost: none is allowed."""
        first = rank * self._room
        mine = np.arange(first, first + self._room)
        my_experts = self._slots[mine]
        # [steps, my slots, all slots]: what the rank gains and the other one loses.
        change = self._slot_loads[:, None, :] - self._slot_loads[:, mine, None]
        largest = np.maximum(
            self._rank_loads[:, rank, None, None] + change, self._rank_loads[:, self._rank_of][:, None, :] - change
        )
        np.maximum(largest, self._largest_elsewhere(rank)[:, self._rank_of][:, None, :], out=largest)
        lying = self._lying()
        lies_here = self._lies[rank, self._slots][None, :] + self._lies[self._rank_of[None, :], my_experts[:, None]]
        after = largest.sum(0) + lying.sum() + lies_here - lying[mine][:, None] - lying[None, :]
        forbidden = self._held[self._rank_of[None, :], my_experts[:, None]] | self._held[rank, self._slots][None, :]
        after[forbidden] = np.inf
        best = int(after.argmin())
        return float(after.flat[best]), int(mine[best // len(self._slots)]), best % len(self._slots)

    def _largest_elsewhere(self, rank: int) -> Floats:
        """[steps, ranks]: the largest load of all ranks but `rank` and that column's."""
        loads = self._rank_loads.copy()
        loads[:, rank] = 0.0
        steps = np.arange(self._steps)
        first = loads.argmax(1)
        largest = loads[steps, first]
        loads[steps, first] = 0.0
        elsewhere = np.repeat(largest[:, None], self._ranks, 1)
        elsewhere[steps, first] = loads.max(1)
        return elsewhere

    def _swap(self, one: int, other: int) -> None:
        a, b = self._rank_of[one], self._rank_of[other]
        expert, incoming = self._slots[one], self._slots[other]
        self._held[a, expert] = self._held[b, incoming] = False
        self._held[a, incoming] = self._held[b, expert] = True
        change = self._shares[:, incoming] - self._shares[:, expert]
        self._rank_loads[:, a] += change
        self._rank_loads[:, b] -= change
        self._slots[one], self._slots[other] = incoming, expert
        self._slot_loads[:, [one, other]] = self._slot_loads[:, [other, one]]

    def _best_replacement(self) -> tuple[float, int, int]:
        """(cost afterwards, slot, its new expert): one replica less of one expert, one more of another."""
        best = (np.inf, 0, 0)
        for slot in np.flatnonzero(self._copies[self._slots] > 1):
            cost, expert = self._replaced(int(slot))
            if cost < best[0]:
                best = (cost, int(slot), expert)
        return best

    def _replaced(self, slot: int) -> tuple[float, int]:
        """Least cost with another expert in that slot, and the expert."""
        old, rank = self._slots[slot], self._rank_of[slot]
        experts = np.flatnonzero(~self._held[rank])
        if not len(experts):
            return np.inf, 0
        more = self._loads[:, old] / np.float32(self._copies[old] - 1) - self._shares[:, old]
        loads = self._rank_loads + self._held[:, old] * more[:, None]
        loads[:, rank] = self._rank_loads[:, rank] - self._shares[:, old]
        share = self._loads[:, experts] / (self._copies[experts] + 1).astype(np.float32)
        # [ranks, steps, experts], so that the maximum runs over whole planes: the other replicas of the new expert get
        # less, this rank gets its share.
        less = share - self._shares[:, experts]
        after = np.where(self._held[:, None, experts], less[None], np.float32(0)) + loads.T[:, :, None]
        after[rank] += share
        return self._with_lying(after.max(0).sum(0, dtype=np.float64), rank, int(old), experts)

    def _with_lying(self, peaks: Floats, rank: int, old: int, experts: npt.NDArray[np.int64]) -> tuple[float, int]:
        off = (self._off * self._held).sum(0)
        old_off = (off[old] - self._off[rank, old]) / (self._copies[old] - 1) - off[old] / self._copies[old]
        new_off = (off[experts] + self._off[rank, experts]) / (self._copies[experts] + 1) - off[experts] / self._copies[
            experts
        ]
        cost = peaks + self._lying().sum() + self._entry[rank, experts] - self._entry[rank, old] + old_off + new_off
        best = int(cost.argmin())
        return float(cost[best]), int(experts[best])

    def _shake(self, rng: np.random.Generator, changes: int = 3) -> None:
        """Random changes: a swap at one of the fullest ranks, or, one time in three, another expert's replica."""
        for _ in range(changes):
            if rng.integers(3):
                self._random_swap(rng)
            else:
                self._random_replacement(rng)

    def _random_swap(self, rng: np.random.Generator) -> None:
        for _ in range(TRIES):
            rank = int(rng.choice(self._rank_loads.argmax(1)))
            one = rank * self._room + int(rng.integers(self._room))
            other = int(rng.integers(len(self._slots)))
            target = self._rank_of[other]
            clash = self._held[rank, self._slots[other]] or self._held[target, self._slots[one]]
            if target != rank and not clash:
                self._swap(one, other)
                return

    def _random_replacement(self, rng: np.random.Generator) -> None:
        spare = np.flatnonzero(self._copies[self._slots] > 1)
        if len(spare):
            slot = int(rng.choice(spare))
            experts = np.flatnonzero(~self._held[self._rank_of[slot]])
            if len(experts):
                slots = self.slots
                slots[slot] = rng.choice(experts)
                self._set(slots)
