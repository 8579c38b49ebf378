"""The priors: curves of prefill batches and decode steps (spec/balancers.md, "Simulator"). Functions take arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64] | npt.NDArray[np.bool_] | float


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """ms of a batch of B requests with C computed and H hit tokens, fitted by others to production logs of
    DeepSeek-V4-Flash: max(floor, base + per_log·ln(B + 1) + first·softplus((C − first_at)/first_width)
    + second·softplus((C − second_at)/second_width) + per_hit·H + with_hit·(share of requests with a hit)
    + hit_ratio·(mean hit ratio)) + attention·Σ new·(hit + new/2)."""

    floor: float = 300.0
    base: float = 244.9
    per_log: float = 37.27
    first: float = 31.47
    first_at: float = 24_576.0
    first_width: float = 4_096.0
    second: float = 7.48
    second_at: float = 81_920.0
    second_width: float = 8_192.0
    per_hit: float = 0.000238
    with_hit: float = 48.2
    hit_ratio: float = 14.65
    attention: float = 0.0
    """ms per pair of tokens; the published curve has no such term."""

    def seconds(
        self,
        requests: Numbers,
        computed: Numbers,
        hit: Numbers = 0.0,
        with_hit: Numbers = 0.0,
        hit_ratio: Numbers = 0.0,
        attention: Numbers = 0.0,
    ) -> Floats:
        """Time of a batch; `hit`: Σ hit tokens, `with_hit` and `hit_ratio`: means over its requests."""
        computed = np.asarray(computed, np.float64)
        ms = (
            self.base
            + self.per_log * np.log1p(requests)
            + self.first * softplus((computed - self.first_at) / self.first_width)
            + self.second * softplus((computed - self.second_at) / self.second_width)
            + self.per_hit * np.asarray(hit)
            + self.with_hit * np.asarray(with_hit)
            + self.hit_ratio * np.asarray(hit_ratio)
        )
        result: Floats = (np.maximum(self.floor, ms) + self.attention * np.asarray(attention)) / 1000
        return result


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """ms of a rank's step: base + per_request·requests + per_token·KV tokens. Synthetic."""

    base: float = 25.0
    per_request: float = 0.08
    per_token: float = 2.0e-6

    def seconds(self, requests: Numbers, kv_tokens: Numbers) -> Floats:
        """Per rank; the slowest rank sets its replica's pace."""
        ms = self.base + self.per_request * np.asarray(requests, np.float64) + self.per_token * np.asarray(kv_tokens)
        result: Floats = np.asarray(ms / 1000)
        return result


def softplus(x: Numbers) -> Floats:
    """ln(1 + eˣ), without overflow."""
    result: Floats = np.logaddexp(0.0, x)
    return result


def attention_pairs(new: Numbers, hit: Numbers) -> Floats:
    """new · (hit + new/2): how many pairs of tokens attend, the published measure of core-attention compute."""
    fresh = np.asarray(new, np.float64)
    result: Floats = fresh * (np.asarray(hit) + fresh / 2)
    return result
