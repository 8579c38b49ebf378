"""Expert placement on recorded routing: planned from the first half of a corpus, judged on the second.

    python -m bench.experts --routing deepseek_v2_lite_routing.npz --json

The file holds, for every corpus NAME, an array NAME_ids: the experts that each token was sent to, integers [layers,
tokens, top k]. A step is 256 consecutive tokens; balancedness is the mean over layers and steps of mean ÷ largest rank
load, replicas of an expert sharing its tokens evenly. Each cell is a corpus and a size of expert parallelism: 8 ranks
with 8 replicas beyond one per expert, 16 with 16, 32 with 32. Three placements: ours, planned from quarter steps of the
first half beginning at the contiguous placement without replicas; EPLB, on the mean loads of the same half (written
here from its description); none, which is that contiguous placement. Moves are counted from it for both. Exit status 1
if a bar is missed: mean over the cells at least EPLB + 0.010, no cell below EPLB − 0.005, in no cell more moves than
EPLB's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench._progress import Advance, Phases
from bench._report import JsonValue, Report, arguments, emit, existing, positive
from headrace.router.balancers.base import Tokens
from headrace.router.balancers.experts.eplb import eplb
from headrace.router.balancers.experts.peaks import PeakBalancer, Sampling
from headrace.router.balancers.experts.placement import balancedness, contiguous, moves

STEP_TOKENS = 256
INTERVAL_TOKENS = 64
"""What ours is planned from: four intervals make a step, sliding by one."""
RESAMPLED = 64
SHAKES = 2
RANKS = (8, 16, 32)
GAIN_MEAN = 0.010
LOSS_CELL = 0.005


class RoutingError(ValueError):
    """The file is no recorded routing; the message says what is missing."""


@dataclass(frozen=True)
class Corpus:
    """Routing of one body of text."""

    name: str
    ids: npt.NDArray[np.integer]
    """[layers, tokens, top k]."""

    def steps(self, half: int, size: int, experts: int) -> Tokens:
        """Tokens by expert of every whole step of `size` tokens of the first (0) or second (1) half: [steps, layers,
        experts]."""
        layers, tokens, _ = self.ids.shape
        middle = tokens // 2
        ids = self.ids[:, :middle] if half == 0 else self.ids[:, middle:]
        whole = ids.shape[1] // size
        if not whole:
            raise RoutingError(f"half of {self.name} has {ids.shape[1]} tokens; at least one step of {size} is needed")
        row = np.arange(whole)[None, :, None] * layers + np.arange(layers)[:, None, None]
        flat = ids[:, : whole * size].reshape(layers, whole, -1).astype(np.int64) + row * experts
        return np.bincount(flat.ravel(), minlength=whole * layers * experts).reshape(whole, layers, experts)


@dataclass(frozen=True)
class Cell:
    """One corpus at one size of expert parallelism."""

    corpus: str
    ep: int
    headrace: float
    eplb: float
    none: float
    moves_headrace: int
    moves_eplb: int
    seconds: float
    """Our planning, all layers, one process, by the wall clock."""
    cpu_seconds: float
    """The same in processor time, which a busy machine does not stretch."""


def read_routing(path: Path) -> list[Corpus]:
    """Corpora of a file, by name. Raises RoutingError."""
    try:
        with np.load(path) as arrays:
            names = [name for name in sorted(arrays) if name.endswith("_ids")]
            corpora = [Corpus(name.removesuffix("_ids"), arrays[name]) for name in names]
    except (ValueError, OSError, EOFError) as error:
        raise RoutingError(f"{path} is no npz file: {error}") from error
    if not corpora:
        raise RoutingError(f"{path} has no array NAME_ids; it needs one per corpus, [layers, tokens, top k]")
    for corpus in corpora:
        if corpus.ids.ndim != 3 or not np.issubdtype(corpus.ids.dtype, np.integer):
            raise RoutingError(f"{corpus.name}_ids must be integers [layers, tokens, top k]")
    return corpora


def measure_cell(corpus: Corpus, ranks: int, experts: int, seed: int) -> Cell:
    """Plan and judge."""
    current = contiguous(corpus.ids.shape[0], experts, ranks)
    unseen = corpus.steps(1, STEP_TOKENS, experts)
    peer = eplb(corpus.steps(0, STEP_TOKENS, experts).sum(0).astype(np.float64), ranks, ranks)
    balancer = PeakBalancer(sampling=Sampling(STEP_TOKENS // INTERVAL_TOKENS, RESAMPLED), shakes=SHAKES, seed=seed)
    intervals = corpus.steps(0, INTERVAL_TOKENS, experts)
    started, cpu = time.monotonic(), time.process_time()
    plan = balancer.plan(intervals, ranks, ranks, current)
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu
    return Cell(
        corpus=corpus.name,
        ep=ranks,
        headrace=balancedness(unseen, plan.placement, ranks),
        eplb=balancedness(unseen, peer, ranks),
        none=balancedness(unseen, current, ranks),
        moves_headrace=moves(current, plan.placement, experts, ranks),
        moves_eplb=moves(current, peer, experts, ranks),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
    )


def measure(corpora: Sequence[Corpus], sizes: Sequence[int], experts: int, seed: int, advance: Advance) -> list[Cell]:
    """Every corpus at every size."""
    cells = []
    for corpus in corpora:
        for ranks in sizes:
            cells.append(measure_cell(corpus, ranks, experts, seed))
            advance()
    return cells


def build_report(cells: Sequence[Cell]) -> Report:
    """The cells, and each bar with whether it is met."""
    gains = [cell.headrace - cell.eplb for cell in cells]
    checks: dict[str, JsonValue] = {
        "mean_gain": sum(gains) / len(gains) >= GAIN_MEAN,
        "no_cell_below": min(gains) >= -LOSS_CELL,
        "no_more_moves": all(cell.moves_headrace <= cell.moves_eplb for cell in cells),
    }
    results: dict[str, JsonValue] = {
        "cells": [asdict(cell) for cell in cells],
        "gain_mean": sum(gains) / len(gains),
        "gain_mean_limit": GAIN_MEAN,
        "gain_least": min(gains),
        "gain_least_limit": -LOSS_CELL,
        "checks": checks,
        "limits_met": all(bool(met) for met in checks.values()),
    }
    rows = [
        {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(cell).items()}
        for cell in cells
    ]
    missed = [check for check, met in checks.items() if not met]
    notes = [
        "Balancedness of the unseen half; moves: expert-layers to be brought, from the placement without replicas.",
        f"Limits missed: {', '.join(missed)}." if missed else "Every limit is met.",
    ]
    return Report("experts", results, rows, notes)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--routing", type=existing, required=True, help="npz with NAME_ids, [layers, tokens, top k]")
    parser.add_argument("--ep", type=positive, nargs="+", default=list(RANKS), help="ranks, each with as many replicas")
    parser.add_argument("--experts", type=positive, default=64, help="routed experts of a layer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        corpora = read_routing(options.routing)
    except RoutingError as error:
        parser.error(str(error))
    with Phases() as phases, phases.phase("cells", len(corpora) * len(options.ep)) as advance:
        cells = measure(corpora, options.ep, options.experts, options.seed, advance)
    report = build_report(cells)
    emit(report, as_json=options.json)
    if not report.results["limits_met"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
