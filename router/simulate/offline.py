"""The perfectly balanced offline run that a simulation's throughput is divided by (spec/balancers.md).

The same requests with perfect knowledge and no waiting: one infinite cache, every prefill batch full, with the mean
number of requests and the mean hit terms; every decode rank always runs the n* requests that make its step as long as
the objective allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.router.cost.prefill import PrefillBatch
from headrace.router.simulate.models import DecodeModel, PrefillModel, balanced_requests
from headrace.router.simulate.workload import Superposition, Workload, WorkloadError


@dataclass(frozen=True, slots=True)
class Unit:
    """What serves: ranks of each role (0: that side is not simulated) and how long they take."""

    prefill_ranks: int
    decode_ranks: int
    prefill: PrefillModel
    decode: DecodeModel
    batch_tokens: int = 32_768
    """Most computed tokens of a prefill batch."""
    step_s: float = 0.050
    """Objective for the time of a token."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds that the requests take at least."""

    requests: int
    prefill_s: float
    """T_P; 0 without prefill ranks."""
    decode_s: float
    """T_D; 0 without decode ranks."""
    batch_s: float
    batch_requests: float
    """Mean requests of a full batch."""
    hit_ratio: float
    """Hit tokens ÷ prompt tokens."""
    balanced_requests: float
    """n*."""

    @property
    def seconds(self) -> float:
        return max(self.prefill_s, self.decode_s)

    @property
    def rate(self) -> float:
        """Requests per second; 0 for no requests."""
        return self.requests / self.seconds if self.seconds else 0.0


def bound(workload: Workload, unit: Unit) -> Bound:
    """T_P = batches · batch time ÷ ranks; T_D = output tokens · step ÷ (ranks · n*). The mean KV length for n* is over
    the running requests: each counts as long as it runs."""
    trace, count = workload.trace, len(workload)
    if not count:
        return Bound(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    prompt = trace.prompt[workload.row]
    output = trace.output[workload.row]
    hit = workload.hit_tokens()
    computed = float((prompt - hit).sum())
    ratio = float(hit.sum() / prompt.sum())
    prefill_s = decode_s = batch_s = batch_requests = running = 0.0
    if unit.prefill_ranks:
        new = prompt - hit
        batches = computed / unit.batch_tokens
        batch_requests = count / batches
        batch_s = unit.prefill.seconds(
            PrefillBatch(
                requests=batch_requests,
                computed_tokens=unit.batch_tokens,
                hit_tokens=float(hit.sum()) / batches,
                with_hit=float((hit > 0).mean()),
                hit_ratio=float((hit / prompt).mean()),
                attention=float((new * (hit + new / 2)).sum()) / batches,
            )
        )
        prefill_s = batches * batch_s / unit.prefill_ranks
    if unit.decode_ranks:
        kv_tokens = float((output * (prompt + output / 2)).sum() / output.sum())
        running = balanced_requests(unit.decode, kv_tokens, unit.step_s)
        decode_s = float(output.sum()) * unit.step_s / (unit.decode_ranks * running)
    return Bound(count, prefill_s, decode_s, batch_s, batch_requests, ratio, running)


def at_load(copies: Superposition, unit: Unit, load: float, begin: float, end: float) -> Workload:
    """The superposition whose requests between two moments need `load` of that time on a perfectly balanced unit.

    So a load is exact for each seed, though the copies' offsets make some minutes busier than others.
    """
    if not 0 <= begin < end <= copies.duration_s:
        raise WorkloadError(
            f"nothing lies between {begin:g} s and {end:g} s of a simulation of {copies.duration_s:g} s"
        )
    if load <= 0:
        raise WorkloadError(f"a load of {load:g} is none")

    def offered(count: float) -> float:
        return bound(copies.workload(count).between(begin, end), unit).seconds / (end - begin)

    low, high = 0.0, 1.0
    while offered(high) < load:
        low, high = high, high * 2
        if high > 1e6:
            raise WorkloadError("the trace is too light to load this unit")
    while high - low > max(1e-3, 5e-4 * high):
        middle = (low + high) / 2
        low, high = (middle, high) if offered(middle) < load else (low, middle)
    return copies.workload(high)
