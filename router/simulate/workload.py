"""Load from a trace: K copies superposed, each with block ids of its own and turned by a random offset in time.

Time is never compressed: 59 minutes at 180 times the rate would become half a minute, and every prefix would be reused
within the second. A copy runs round its trace like a ring: behind the trace's end comes its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.router.simulate.traces import Trace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

DEFAULT_BLOCK_TOKENS = 512
"""For traces that name no blocks."""
POPULAR = 0.01
"""A block that more than this share of a trace's requests begin with ties no session together: a system prompt."""


class WorkloadError(ValueError):
    """A trace or load that no simulation can be made of."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceColumns:
    """The requests of a trace in order of time, as columns; blocks of request i: ids[starts[i]:starts[i + 1]]."""

    at: Floats
    """Seconds from the first request."""
    prompt: Ints
    output: Ints
    """At least 1: requests without output are not in it."""
    starts: Ints
    ids: Ints
    """0, 1, 2 …: full blocks only, as the service keys them."""
    block_tokens: int
    period_s: float
    """Length of the ring."""
    dropped: int
    """Requests without output, which were left out."""

    def __len__(self) -> int:
        return len(self.at)

    @property
    def rate(self) -> float:
        """Requests per second of one copy."""
        return len(self.at) / self.period_s


def columns(trace: Trace) -> TraceColumns:
    """The columns of a trace. Raises WorkloadError for one that has nothing to simulate."""
    rows = [row for row in trace.rows if row.output_tokens > 0]
    if not rows:
        raise WorkloadError("the trace has no request with output; nothing can be simulated")
    block_tokens = trace.block_tokens or DEFAULT_BLOCK_TOKENS
    numbers: dict[int, int] = {}
    starts, ids = [0], []
    for row in rows:
        for block in row.blocks[: row.prompt_tokens // block_tokens]:
            ids.append(numbers.setdefault(block, len(numbers)))
        starts.append(len(ids))
    times = np.array([row.at_s for row in rows], np.float64)
    times -= times[0]
    span = float(times[-1])
    # One mean gap behind the last request, so that the ring's seam has the trace's rate.
    period = span + span / max(1, len(rows) - 1) if span > 0 else 1.0
    return TraceColumns(
        at=times,
        prompt=np.array([row.prompt_tokens for row in rows], np.int64),
        output=np.array([row.output_tokens for row in rows], np.int64),
        starts=np.array(starts, np.int64),
        ids=np.array(ids, np.int64),
        block_tokens=block_tokens,
        period_s=period,
        dropped=len(trace.rows) - len(rows),
    )


def sessions(trace: TraceColumns) -> Ints:
    """A number per request, equal for requests that share a block which is not popular (chats, agent loops).

    Blocks form a tree of prefixes, so the first unpopular block of a prompt names the subtree that it is in.
    """
    lengths = np.diff(trace.starts)
    holders = np.bincount(trace.ids, minlength=int(trace.ids.max(initial=-1)) + 1)
    limit = max(1, math.ceil(POPULAR * len(trace)))
    own = len(holders) + np.arange(len(trace), dtype=np.int64)
    for i in np.flatnonzero(lengths > 0).tolist():
        blocks = trace.ids[trace.starts[i] : trace.starts[i + 1]]
        private = np.flatnonzero(holders[blocks] <= limit)
        if len(private):
            own[i] = blocks[private[0]]
    return own


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of time. `hit_blocks`: leading blocks that one infinite cache, shared by all and filled from
    the start of the simulation, would have."""

    trace: TraceColumns
    at: Floats
    row: Ints
    """Of the trace."""
    copy: Ints
    hit_blocks: Ints
    copies: float

    def __len__(self) -> int:
        return len(self.at)

    def hit_tokens(self) -> Ints:
        """As `hit_blocks`; of every prompt at least one token has to be computed."""
        prompt = self.trace.prompt[self.row]
        usable = (prompt - 1) // self.trace.block_tokens
        return np.minimum(self.hit_blocks, usable) * self.trace.block_tokens

    def between(self, begin: float, end: float) -> Workload:
        """The requests of a part of the time."""
        low, high = np.searchsorted(self.at, (begin, end))
        part = slice(int(low), int(high))
        return Workload(self.trace, self.at[part], self.row[part], self.copy[part], self.hit_blocks[part], self.copies)


class Superposition:
    """Copies of one trace for one seed. Copy 0, 1, 2 … is the same whatever the load, so loads of a seed are nested."""

    def __init__(self, trace: TraceColumns, seed: int, duration_s: float) -> None:
        """`duration_s`: of the simulation, at most once round the ring. Raises WorkloadError."""
        if not 0 < duration_s <= trace.period_s:
            raise WorkloadError(
                f"{duration_s:g} s do not fit into the trace of {trace.period_s:.0f} s; simulate a shorter time"
            )
        self.trace = trace
        self.duration_s = duration_s
        self._random = np.random.default_rng(seed)
        self._offsets: list[float] = []
        n = len(trace)
        self._twice = np.concatenate((trace.at, trace.at + trace.period_s))
        self._starts = np.concatenate((trace.starts[:-1], trace.starts + len(trace.ids)))
        self._previous = _previous(trace)
        groups = sessions(trace)
        names, counts = np.unique(groups, return_counts=True)
        order = np.random.default_rng((seed, 1)).permutation(len(names))
        kept_before = np.cumsum(counts[order]) / n
        share = np.empty(len(names))
        share[order] = kept_before
        self._enters = share[np.searchsorted(names, groups)]
        """The fraction of a copy from which on the request is in it; whole sessions enter together."""
        self._parts: list[tuple[Floats, Ints, Ints]] = []

    def workload(self, copies: float) -> Workload:
        """K copies; of the last, if it is not whole, that share of its sessions. Raises WorkloadError for none."""
        if copies <= 0:
            raise WorkloadError(f"{copies:g} copies of a trace are no load")
        whole = math.floor(copies)
        at, rows, numbers, hits = [], [], [], []
        for number in range(math.ceil(copies)):
            times, ring, hit = self._copy(number)
            if number == whole:
                keep = self._enters[ring] <= copies - whole
                times, ring = times[keep], ring[keep]
                hit = self._leading(ring)
            at.append(times)
            rows.append(ring)
            hits.append(hit)
            numbers.append(np.full(len(times), number, np.int64))
        times = np.concatenate(at)
        order = np.argsort(times, kind="stable")
        return Workload(
            self.trace,
            times[order],
            np.concatenate(rows)[order],
            np.concatenate(numbers)[order],
            np.concatenate(hits)[order],
            copies,
        )

    def _leading(self, rows: Ints) -> Ints:
        """Hit blocks of requests in their order, without those that were left out: by walking through them."""
        held: set[int] = set()
        found = np.zeros(len(rows), np.int64)
        for place, row in enumerate(rows.tolist()):
            blocks = self.trace.ids[self.trace.starts[row] : self.trace.starts[row + 1]].tolist()
            found[place] = next((number for number, block in enumerate(blocks) if block not in held), len(blocks))
            held.update(blocks)
        return found

    def _copy(self, number: int) -> tuple[Floats, Ints, Ints]:
        """(arrivals, rows of the trace, hit blocks) of one copy, whole."""
        while len(self._parts) <= number:
            offset = float(self._random.uniform(0.0, self.trace.period_s))
            begin, end = np.searchsorted(self._twice, (offset, offset + self.duration_s)).tolist()
            low, high = int(self._starts[begin]), int(self._starts[end])
            present = np.concatenate(([0], np.cumsum(self._previous[low:high] >= begin)))
            hits = present[self._starts[begin + 1 : end + 1] - low] - present[self._starts[begin:end] - low]
            rows = np.arange(begin, end, dtype=np.int64) % len(self.trace)
            self._parts.append((self._twice[begin:end] - offset, rows, hits.astype(np.int64)))
        return self._parts[number]


def _previous(trace: TraceColumns) -> Ints:
    """For each block of the ring run through twice: in which request it, and with it every block before it in its
    prompt, last stood before; -1: never."""
    n = len(trace)
    lengths = np.diff(trace.starts)
    request = np.concatenate((np.repeat(np.arange(n), lengths), np.repeat(np.arange(n, 2 * n), lengths)))
    ids = np.concatenate((trace.ids, trace.ids))
    order = np.argsort(ids, kind="stable")
    previous = np.full(len(ids), -1, np.int64)
    same = ids[order][1:] == ids[order][:-1]
    previous[order[1:][same]] = request[order[:-1][same]]
    starts = np.concatenate((trace.starts[:-1], trace.starts + len(trace.ids)))
    for i in range(2 * n):
        part = slice(int(starts[i]), int(starts[i + 1]))
        previous[part] = np.minimum.accumulate(previous[part])
    return previous


KEY_WORDS = 4
ARRIVALS_AT_A_TIME = 1024
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser: neighbours become unlike in every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class BlockKeys:
    """Keys of blocks, as unlike each other as SHA-256 makes those of the service: 32 bytes of (copy, block id)."""

    def __init__(self, trace: TraceColumns) -> None:
        self._trace = trace
        count = int(trace.ids.max(initial=-1)) + 1
        lanes = np.arange(1, KEY_WORDS + 1, dtype=np.uint64) * _GOLDEN
        self._words = _mixed(np.arange(count, dtype=np.uint64)[:, None] + lanes)
        """By block id: [blocks, KEY_WORDS]."""

    def of(self, rows: Ints, copies: Ints) -> list[list[bytes]]:
        """Keys of the full blocks of requests."""
        trace = self._trace
        begin = trace.starts[rows]
        lengths = trace.starts[rows + 1] - begin
        ends = np.cumsum(lengths)
        places = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(begin - (ends - lengths), lengths)
        salts = (copies.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95)
        mixed = (self._words[trace.ids[places]] ^ np.repeat(salts, lengths)[:, None]) * np.uint64(0xBF58476D1CE4E5B9)
        keys: list[bytes] = (mixed ^ (mixed >> np.uint64(32))).view(f"V{8 * KEY_WORDS}").ravel().tolist()
        return [keys[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


class Arrival(NamedTuple):
    """One request of a workload, in plain numbers."""

    at: float
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[bytes]


def walk(workload: Workload, *, keyed: bool) -> Iterator[Arrival]:
    """The requests in order of time, without keys where nobody looks at them; made some at a time, as they are asked
    for."""
    trace, keys = workload.trace, BlockKeys(workload.trace)
    for first in range(0, len(workload), ARRIVALS_AT_A_TIME):
        part = slice(first, first + ARRIVALS_AT_A_TIME)
        row, copy = workload.row[part], workload.copy[part]
        blocks: Sequence[Sequence[bytes]] = keys.of(row, copy) if keyed else [()] * len(row)
        columns = workload.at[part].tolist(), trace.prompt[row].tolist(), trace.output[row].tolist(), blocks
        yield from map(Arrival, *columns)
