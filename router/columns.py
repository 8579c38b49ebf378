"""Ranks of one role as arrays with one entry per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.router.ranks import RankNumbers
from headrace.router.rendezvous import Weights, seed
from headrace.router.topology import Candidate, RankId

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The ranks of one role in a stable order; every array has one entry per rank."""

    candidates: tuple[Candidate, ...]
    numbers: Ints
    """Rank numbers: rows of every table of the router."""
    rows: Ints
    slots: Ints
    """0: unlimited."""
    block_tokens: Ints
    context_tokens: Ints
    replica: Ints
    """0, 1, 2 …: ranks of one replica step together and have the same number."""
    replicas: int
    data_centre: Ints
    """Equal numbers are one data centre, over all roles."""
    seeds: Weights
    """For rendezvous.weights."""
    index: Ints | slice
    """As `numbers`, but a slice where that is the same: tables are then looked at without a copy."""
    block: int | Ints
    """As `block_tokens`, but one number where all ranks agree."""
    smallest: Candidate | None
    """Least of every capacity: what it can hold, all can. None without ranks."""
    every: Flags
    """All true. Nobody writes to it."""

    def __len__(self) -> int:
        return len(self.candidates)

    def data_centre_of(self, rank: RankId) -> int | None:
        """The data centre's number; None for a rank that is not here."""
        row = next((row for row, candidate in enumerate(self.candidates) if candidate.id == rank), None)
        return None if row is None else int(self.data_centre[row])

    def fits(self, prompt_tokens: int, choices: int) -> Flags:
        """Which ranks could hold the request if they were empty (Candidate.fits). Decode books ⌈(prompt + 1)/block⌉
        rows, and a private partial block per further choice."""
        least = self.smallest
        if least is not None:
            rows_of_least = -(-(prompt_tokens + 1) // least.block_tokens) + choices - 1
            if least.fits(prompt_tokens, rows_of_least, choices):
                return self.every
        rows = -(-(prompt_tokens + 1) // self.block_tokens) + choices - 1
        slots_fit = (self.slots == 0) | (choices <= self.slots)
        fits: Flags = slots_fit & (rows <= self.rows) & (prompt_tokens < self.context_tokens)
        return fits


def build(candidates: Sequence[Candidate], numbers: RankNumbers, data_centres: dict[str, int]) -> Columns:
    """Columns of ranks; numbers of new data centres are added to `data_centres`."""
    replicas = {name: at for at, name in enumerate(dict.fromkeys(rank.id.replica_id for rank in candidates))}

    def column(values: Iterable[int]) -> Ints:
        return np.fromiter(values, np.int64, len(candidates))

    of = column(numbers.take(rank.id) for rank in candidates)
    blocks = column(rank.block_tokens for rank in candidates)
    straight = len(of) > 0 and bool((np.diff(of) == 1).all())
    same_block = len(blocks) > 0 and bool((blocks == blocks[0]).all())
    every = np.ones(len(candidates), np.bool_)
    every.flags.writeable = False
    return Columns(
        tuple(candidates),
        numbers=of,
        rows=column(rank.rows for rank in candidates),
        slots=column(rank.slots for rank in candidates),
        block_tokens=blocks,
        context_tokens=column(rank.context_tokens for rank in candidates),
        replica=column(replicas[rank.id.replica_id] for rank in candidates),
        replicas=len(replicas),
        data_centre=column(data_centres.setdefault(rank.data_centre, len(data_centres)) for rank in candidates),
        seeds=np.fromiter((seed(rank.id) for rank in candidates), np.uint64, len(candidates)),
        index=slice(int(of[0]), int(of[-1]) + 1) if straight else of,
        block=int(blocks[0]) if same_block else blocks,
        smallest=_smallest(candidates),
        every=every,
    )


def _smallest(candidates: Sequence[Candidate]) -> Candidate | None:
    if not candidates:
        return None
    limited = [rank.slots for rank in candidates if rank.slots]
    return replace(
        candidates[0],
        rows=min(rank.rows for rank in candidates),
        slots=min(limited, default=0),
        # Rows that a prompt needs grow as blocks shrink.
        block_tokens=min(rank.block_tokens for rank in candidates),
        context_tokens=min(rank.context_tokens for rank in candidates),
    )
