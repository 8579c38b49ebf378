"""How long engines take: the truth of a simulation, which the router only learns from reports.

The default curves are those of spec/balancers.md, "Simulator": prefill was fitted by others to production logs of
DeepSeek-V4-Flash, the decode step is synthetic. Tables measured on an engine take their place (`engine_file.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from headrace.router.cost.curves import Floats, Ints, PrefillCurve
from headrace.router.cost.prefill import PrefillBatch


class PrefillModel(Protocol):
    """Time of a prefill batch."""

    def seconds(self, batch: PrefillBatch) -> float: ...


class DecodeModel(Protocol):
    """Time that each rank needs for a decode step; the slowest sets the pace of its replica. `cost.curves.DecodeCurve`
    is one."""

    def seconds(self, requests: Ints, kv_tokens: Ints) -> Floats:
        """Per rank, shape [ranks]."""
        ...


def softplus(x: float) -> float:
    """ln(1 + eˣ), without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@dataclass(frozen=True, slots=True)
class PublishedPrefill:
    """The published curve, for one batch at a time: `cost.curves.PrefillCurve` takes arrays, which cost ten times as
    much for a single number."""

    curve: PrefillCurve = field(default_factory=PrefillCurve)

    def seconds(self, batch: PrefillBatch) -> float:
        curve = self.curve
        milliseconds = (
            curve.base
            + curve.per_log * math.log(batch.requests + 1)
            + curve.first * softplus((batch.computed_tokens - curve.first_at) / curve.first_width)
            + curve.second * softplus((batch.computed_tokens - curve.second_at) / curve.second_width)
            + curve.per_hit * batch.hit_tokens
            + curve.with_hit * batch.with_hit
            + curve.hit_ratio * batch.hit_ratio
        )
        return (max(curve.floor, milliseconds) + curve.attention * batch.attention) / 1000


@dataclass(frozen=True, slots=True)
class PrefillTable:
    """Measured: ms by computed tokens, linear between the points and with the last slope beyond them."""

    computed_tokens: tuple[float, ...]
    ms: tuple[float, ...]
    per_request: float = 0.0
    per_hit: float = 0.0
    attention: float = 0.0

    def seconds(self, batch: PrefillBatch) -> float:
        milliseconds = (
            _interpolate(batch.computed_tokens, self.computed_tokens, self.ms)
            + self.per_request * batch.requests
            + self.per_hit * batch.hit_tokens
            + self.attention * batch.attention
        )
        return milliseconds / 1000


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTable:
    """Measured: ms[i, j] at requests[i] and kv_tokens[j], bilinear, with the last slopes beyond the grid."""

    requests: Floats
    kv_tokens: Floats
    ms: Floats

    def seconds(self, requests: Ints, kv_tokens: Ints) -> Floats:
        i = np.clip(np.searchsorted(self.requests, requests, side="right") - 1, 0, len(self.requests) - 2)
        j = np.clip(np.searchsorted(self.kv_tokens, kv_tokens, side="right") - 1, 0, len(self.kv_tokens) - 2)
        x = (requests - self.requests[i]) / (self.requests[i + 1] - self.requests[i])
        y = (kv_tokens - self.kv_tokens[j]) / (self.kv_tokens[j + 1] - self.kv_tokens[j])
        low = self.ms[i, j] * (1 - y) + self.ms[i, j + 1] * y
        high = self.ms[i + 1, j] * (1 - y) + self.ms[i + 1, j + 1] * y
        result: Floats = (low * (1 - x) + high * x) / 1000
        return result


def balanced_requests(model: DecodeModel, mean_kv_tokens: float, step_s: float) -> float:
    """n*: how many requests of a mean KV length a rank runs in steps of `step_s`, as a real number. Raises ValueError
    when even an idle step takes longer."""

    def took(requests: float) -> float:
        # The model takes whole numbers; a thousandfold grid keeps three digits for it.
        low = math.floor(requests)
        kv = np.array([round(low * mean_kv_tokens), round((low + 1) * mean_kv_tokens)], np.int64)
        times = model.seconds(np.array([low, low + 1], np.int64), kv)
        return float(times[0] + (times[1] - times[0]) * (requests - low))

    if took(0) >= step_s:
        raise ValueError(f"an empty decode step takes {took(0) * 1000:.1f} ms, which is not below {step_s * 1000:g} ms")
    low, high = 0.0, 1.0
    while took(high) < step_s:
        low, high = high, high * 2
        if high > 1e9:
            raise ValueError("the decode model's step does not grow with requests; there is no n* for it")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if took(middle) < step_s else (low, middle)
    return low


def _interpolate(x: float, points: Sequence[float], values: Sequence[float]) -> float:
    at = min(max(int(np.searchsorted(points, x, side="right")) - 1, 0), len(points) - 2)
    share = (x - points[at]) / (points[at + 1] - points[at])
    return values[at] + (values[at + 1] - values[at]) * share
