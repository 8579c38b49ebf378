"""What a run is judged by: times to and per token, backlog, and max/mean of the four quantities to be equalised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headrace.router.simulate.cluster import Simulation
from headrace.router.simulate.request import End, SimRequest

Floats = npt.NDArray[np.float64]

SAMPLE_S = 0.25
"""How often decode ranks are looked at."""
WINDOW_S = 10.0
"""Prefill ranks are compared by their work in windows of this length: their batches have no common step."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service levels of spec/balancers.md."""

    ttft_s: float = 4.0
    tpot_s: float = 0.050
    misses: float = 0.01
    """Share of requests that may miss one: the 99th percentile keeps it."""


OBJECTIVES = Objectives()


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Spread:
    """max/mean over ranks; mean and 95th percentile over the windows or steps of the run."""

    run: float
    mean: float
    p95: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Of the requests that arrived after the warm-up. Seconds."""

    requests: int
    ttft: Percentiles
    tpot: Percentiles | None
    hit_ratio: float
    """Cached and loaded prompt tokens ÷ prompt tokens, of the requests that have their first token."""
    loaded_ratio: float
    missed_ttft: float
    """Share of requests."""
    missed_tpot: float
    unserved: float
    """Share that was refused or failed."""
    backlog_s: tuple[float, ...]
    """Waiting prefill work per rank, once a second."""
    backlog_growth: float
    """Share of the offered work that was left behind."""
    spreads: dict[str, Spread]
    """prefill_tokens, attention, decode_kv, decode_requests; only of sides that are simulated."""
    shares: dict[str, tuple[float, ...]]
    """Computed tokens of every prefill rank, generated tokens of every decode replica ÷ their means."""


def percentiles(values: Sequence[float]) -> Percentiles:
    """p50 and p99; of nothing 0."""
    if not values:
        return Percentiles(0.0, 0.0)
    # `higher` takes a value that occurred, also beside an infinite one.
    low, high = np.percentile(np.array(values), (50, 99), method="higher")
    return Percentiles(float(low), float(high))


class Recorder:
    """Watches a simulation. Requests that arrive in [begin, end) are measured."""

    def __init__(self, simulation: Simulation, begin: float, end: float, expected: int, aims: Objectives) -> None:
        """`expected`: requests that will be measured."""
        self._simulation = simulation
        self._begin, self._end, self._aims = begin, end, aims
        self._expected = expected
        self._tpot: list[float] = []
        self._ttft: list[float] = []
        self._prompt = self._hit = self._loaded = 0
        self._bad_ttft = self._bad_tpot = self._unserved = self._count = 0
        self._kv: list[tuple[float, float]] = []
        """(max/mean of KV, of requests) by sample."""
        self._work: list[tuple[Floats, Floats]] = []
        """(computed tokens, attention) by rank at the windows' ends, cumulative."""
        self._backlog: list[float] = []
        self._requests_kept: list[SimRequest] = []
        simulation.on_end = self._ended
        simulation.clock.at(begin, self._sample)
        simulation.clock.at(begin, self._window)
        simulation.clock.at(begin, self._second)

    def measures(self, request: SimRequest) -> bool:
        return self._begin <= request.arrived < self._end

    def _ended(self, request: SimRequest) -> None:
        if not self.measures(request):
            return
        self._count += 1
        if request.end is not End.FINISHED:
            self._unserved += 1
            self._ttft.append(math.inf)
            self._bad_ttft += 1
            return
        self._take_first(request)
        if request.output_tokens > 1 and request.first_at is not None and request.ended_at is not None:
            self._take_tpot((request.ended_at - request.first_at) / (request.output_tokens - 1))

    def _take_first(self, request: SimRequest) -> None:
        first = request.first_at
        ttft = (self._simulation.clock.now if first is None else first) - request.arrived
        self._ttft.append(ttft)
        self._bad_ttft += ttft > self._aims.ttft_s
        if first is not None:
            self._prompt += request.prompt_tokens
            self._hit += request.hit_tokens
            self._loaded += request.loaded_tokens

    def _take_tpot(self, tpot: float) -> None:
        if self._simulation.decode:
            self._tpot.append(tpot)
            self._bad_tpot += tpot > self._aims.tpot_s

    def _sample(self) -> None:
        simulation = self._simulation
        simulation.clock.after(SAMPLE_S, self._sample)
        alive = [one for one in simulation.decode if one.alive]
        if not alive:
            return
        kv = np.concatenate([one.kv for one in alive])
        requests = np.concatenate([one.requests for one in alive])
        if kv.any():
            self._kv.append((float(kv.max() / kv.mean()), float(requests.max() / requests.mean())))

    def _window(self) -> None:
        simulation = self._simulation
        simulation.clock.after(WINDOW_S, self._window)
        tokens = np.array([rank.computed_tokens for rank in simulation.prefill], np.float64)
        self._work.append((tokens, np.array([rank.attention for rank in simulation.prefill])))

    def _second(self) -> None:
        simulation = self._simulation
        simulation.clock.after(1.0, self._second)
        if simulation.prefill:
            cluster = simulation.cluster
            waiting = sum(rank.waiting_tokens for rank in simulation.prefill)
            self._backlog.append(waiting / (cluster.batch_tokens * len(simulation.prefill)))

    def hopeless(self) -> bool:
        """More requests than may have missed an objective already, so that the percentile cannot keep it any more."""
        allowed = self._aims.misses * self._expected
        if self._bad_tpot > allowed:
            return True
        now, late = self._simulation.clock.now, self._bad_ttft
        for request in self._simulation.live.values():
            if request.first_at is None and self.measures(request) and now - request.arrived > self._aims.ttft_s:
                late += 1
            elif request.first_at is not None and request.first_at - request.arrived > self._aims.ttft_s:
                late += self.measures(request)
        return late > allowed

    def measured(self, batch_s: float) -> Measured:
        """The result; requests that still run count with the tokens they have. `batch_s`: time of a full batch."""
        simulation = self._simulation
        tpot, ttft, count = list(self._tpot), list(self._ttft), self._count
        bad_ttft, bad_tpot = self._bad_ttft, self._bad_tpot
        prompt, hit, loaded = self._prompt, self._hit, self._loaded
        for held in simulation.at_decode.values():
            for attempt in held:
                request = attempt.request
                if not self.measures(request) or request.first_at is None or attempt.decode_rank < 0:
                    continue
                replica, _ = simulation.decode_ranks[attempt.decode_rank]
                tokens = replica.progress(attempt)
                if tokens > MEANINGFUL_TOKENS:
                    value = (replica.stepped_at - request.first_at) / (tokens - 1)
                    tpot.append(value)
                    bad_tpot += value > self._aims.tpot_s
        for request in simulation.live.values():
            if self.measures(request):
                count += 1
                first = simulation.clock.now if request.first_at is None else request.first_at
                ttft.append(first - request.arrived)
                bad_ttft += ttft[-1] > self._aims.ttft_s
                if request.first_at is not None:
                    prompt += request.prompt_tokens
                    hit += request.hit_tokens
                    loaded += request.loaded_tokens
        seconds = [batches * batch_s for batches in self._backlog]
        return Measured(
            requests=count,
            ttft=percentiles(ttft),
            tpot=percentiles(tpot) if simulation.decode else None,
            hit_ratio=hit / prompt if prompt else 0.0,
            loaded_ratio=loaded / prompt if prompt else 0.0,
            missed_ttft=bad_ttft / count if count else 0.0,
            missed_tpot=bad_tpot / len(tpot) if tpot else 0.0,
            unserved=self._unserved / count if count else 0.0,
            backlog_s=tuple(round(value, 3) for value in seconds),
            backlog_growth=growth(seconds),
            spreads=self._spreads(),
            shares=self._shares(),
        )

    def _spreads(self) -> dict[str, Spread]:
        spreads: dict[str, Spread] = {}
        for name, column in (("prefill_tokens", 0), ("attention", 1)):
            marks = [mark[column] for mark in self._work if len(mark[column]) == len(self._work[-1][column])]
            if len(marks) > 1 and len(marks[0]):
                windows = [_imbalance(later - earlier) for earlier, later in pairwise(marks)]
                run = _imbalance(marks[-1] - marks[0])
                spreads[name] = Spread(run, float(np.mean(windows)), float(np.percentile(windows, 95)))
        if self._kv:
            for name, column in (("decode_kv", 0), ("decode_requests", 1)):
                values = [sample[column] for sample in self._kv]
                spreads[name] = Spread(max(values), float(np.mean(values)), float(np.percentile(values, 95)))
        return spreads

    def _shares(self) -> dict[str, tuple[float, ...]]:
        work = {
            "prefill": np.array([float(rank.computed_tokens) for rank in self._simulation.prefill]),
            "decode": np.array([float(one.tokens) for one in self._simulation.decode]),
        }
        return {
            name: tuple(round(float(share), 3) for share in values / values.mean())
            for name, values in work.items()
            if len(values) and values.any()
        }


MEANINGFUL_TOKENS = 16
"""A request that has fewer tokens at the end of the run tells nothing about its time per token."""


def growth(backlog_s: Sequence[float]) -> float:
    """How much more waits per second, from the first quarter of a run to its last; seconds of work per second."""
    quarter = len(backlog_s) // 4
    if quarter < 1:
        return 0.0
    return float(np.mean(backlog_s[-quarter:]) - np.mean(backlog_s[:quarter])) / (len(backlog_s) - quarter)


def _imbalance(work: Floats) -> float:
    mean = float(work.mean())
    return float(work.max()) / mean if mean > 0 else 1.0
