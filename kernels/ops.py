"""The one list of operators: what each takes and gives. Backends implement these signatures; `select` picks them.

Conventions: T rows of a step stand first; D is a head's width, hc the number of residual streams, d the hidden size.
Operators compute in float32 where the text says so and return the dtype of their first argument unless stated.
None of them reads a device tensor back to the host on a GPU. Sources are sections of spec/deepseek_v41.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from headrace.kernels.weights import Fp8Rows, Swiglu, Weight


class Routing(NamedTuple):
    """Chosen experts of each row."""

    experts: torch.Tensor
    """[T, k] int64, best first; equal scores: lower id first."""
    weights: torch.Tensor
    """[T, k] float32."""


class Mixes(NamedTuple):
    """Coefficients of one hyper-connection (§6), all float32."""

    pre: torch.Tensor
    """[T, hc] collapse weights, used by the *next* sublayer."""
    post: torch.Tensor
    """[T, hc]."""
    combine: torch.Tensor
    """[T, hc, hc], first index = source stream."""


class Linear(Protocol):
    def __call__(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., in] → [..., out]`` in x's dtype. Plain weight: a product in x's dtype (the weight must have it).
        Fp8Weight, Fp4Weight: x passes through the e4m3 quantiser, products accumulate in float32 (§3.6)."""
        ...


class LinearFp32(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Input and weight widened to float32, result float32 (§3.6: router, head, r > 1 compressor, hc fn)."""
        ...


class RmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``weight · x · rsqrt(mean(x²) + eps)`` over the last axis in float32, cast to x's dtype (§4)."""
        ...


class Rope(Protocol):
    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """Rotate adjacent pairs of the last 2·R channels of ``x [T, ..., D]`` by ``cos, sin [T, R]`` float32 (§5)."""
        ...


class RoundTrip(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x as a cache or a linear sees it after quantising the last axis (§3), in x's dtype."""
        ...


class EncodeEntry(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., D] → uint8 [..., bytes]``, data then scales (§17.1)."""
        ...


class DecodeEntry(Protocol):
    def __call__(self, entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Inverse of the encoder: ``uint8 [..., bytes] → [..., D]``; every value is exact in bf16 and float32."""
        ...


class HyperMixes(Protocol):
    def __call__(
        self,
        streams: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        *,
        norm_eps: float,
        hc_eps: float,
        iterations: int,
    ) -> Mixes:
        """Coefficients from ``streams [T, hc, d]``, ``fn [(2+hc)·hc, hc·d]``, ``scale [3]``, ``base [(2+hc)·hc]``."""
        ...


class HyperCollapse(Protocol):
    def __call__(self, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """``Σ_j pre[t, j] · streams[t, j]`` in float32 → [T, d] in the streams' dtype (§6)."""
        ...


class HyperExpand(Protocol):
    def __call__(
        self, out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, combine: torch.Tensor
    ) -> torch.Tensor:
        """``streams'[k] = post[k]·out + Σ_j combine[j, k]·streams[j]`` → [T, hc, d] in the streams' dtype (§6)."""
        ...


class EngramHash(Protocol):
    def __call__(
        self, context: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Table rows ``[T, (N−1)·h]`` of n-grams 2..N from ``context [T, N]`` compressed ids, newest first; int64
        throughout; ``multipliers [N]``, ``primes [N−1, h]``, ``offsets [(N−1)·h]`` (§13)."""
        ...


class EngramLookup(Protocol):
    def __call__(self, rows: torch.Tensor, table: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
        """``rows [T, C] → [T, C·width]`` of dequantised table rows, side by side. Rows outside the table give 0."""
        ...


class EngramGate(Protocol):
    def __call__(
        self,
        streams: torch.Tensor,
        keys: torch.Tensor,
        value: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        image_mask: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """``streams[t, j] + g[t, j] · value[t]`` with ``streams, keys [T, hc, d]``, ``value [T, d]``, weights
        ``[hc, d]``; rows where ``image_mask [T]`` is true come back unchanged (§13)."""
        ...


class Route(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        bias: torch.Tensor,
        image_bias: torch.Tensor | None,
        image_mask: torch.Tensor | None,
        *,
        top_k: int,
        scale: float,
    ) -> Routing:
        """V4.1's router: scores sqrt(softplus(gate · x)); the bias chooses, the unbiased scores weigh (§10).
        ``gate [experts, d]``, biases ``[experts]``; ``image_mask [T]`` picks the image bias."""
        ...


class RouteGrouped(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        bias: torch.Tensor,
        *,
        top_k: int,
        groups: int,
        top_groups: int,
        scale: float,
        normalise: bool,
    ) -> Routing:
        """V3's router: sigmoid scores; the ``top_groups`` groups with the best sum of two biased scores stay, the
        ``top_k`` best biased scores in them are chosen, the unbiased ones weigh."""
        ...


class SwigluOp(Protocol):
    def __call__(
        self, x: torch.Tensor, weights: Swiglu, *, limit: float = 0.0, row_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``down(silu(min(gate·x, limit)) · clamp(up·x, ±limit) · row_weight)``; limit 0 means no clamp (§10)."""
        ...


class Experts(Protocol):
    def __call__(
        self, x: torch.Tensor, routing: Routing, experts: Sequence[Swiglu], *, limit: float = 0.0
    ) -> torch.Tensor:
        """``Σ_k swiglu(x, experts[routing.experts[t, k]], row_weight=routing.weights[t, k])`` → [T, d] float32,
        summed in ascending expert order."""
        ...


class PoolGroup(Protocol):
    def __call__(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``Σ_t softmax_t(gates) · values`` per channel: ``[T, r, D]`` float32 → [T, D]; a gate of −inf counts nothing
        (§8)."""
        ...


class IndexScores(Protocol):
    def __call__(self, q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``Σ_h relu(q[g, t, h] · keys[g, j]) · weights[g, t, h]`` float32 [G, m, J] from ``q [G, m, H, I]``,
        ``keys [G, J, I]``, ``weights [G, m, H]`` (§9)."""
        ...


class SelectEntries(Protocol):
    def __call__(self, scores: torch.Tensor, k: int) -> torch.Tensor:
        """The k best entries of each row of ``scores [T, J]`` (−inf = unreachable) → int64 [T, k] ascending, −1 where
        there are fewer; equal scores: lower position (§9)."""
        ...


class CandidateBlocks(Protocol):
    def __call__(self, scores: torch.Tensor, visible: torch.Tensor, block: int, count: int) -> torch.Tensor:
        """Blocks that later index sources may search: bool [T, ⌈J/block⌉] from masked ``scores [T, J]`` and the count
        ``visible [T]`` of reachable entries (§9)."""
        ...


class SparseAttention(Protocol):
    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Every row over its own keys, a key being its own value, one sink logit per head: ``q [T, H, D]``,
        ``keys [T, K, D]``, ``valid [T, K]`` bool, ``sink [H]`` → [T, H, D] (§7)."""
        ...


@dataclass(frozen=True)
class Operators:
    """One implementation per operator, as a model holds them."""

    linear: Linear
    linear_fp32: LinearFp32
    rms_norm: RmsNorm
    rope: Rope
    rope_halves: Rope
    """Half-split pairing (vision, V3): channel c of the last 2·R turns with c + R."""
    round_trip_e4m3: RoundTrip
    round_trip_fp4_index: RoundTrip
    round_trip_fp4_main: RoundTrip
    encode_swa: EncodeEntry
    decode_swa: DecodeEntry
    encode_main: EncodeEntry
    decode_main: DecodeEntry
    encode_index: EncodeEntry
    """Per entry; a block's index section keeps all data before all scales, which the writer of the section does."""
    decode_index: DecodeEntry
    hyper_mixes: HyperMixes
    hyper_collapse: HyperCollapse
    hyper_expand: HyperExpand
    engram_hash: EngramHash
    engram_lookup: EngramLookup
    engram_gate: EngramGate
    route: Route
    route_grouped: RouteGrouped
    swiglu: SwigluOp
    experts: Experts
    pool_group: PoolGroup
    index_scores: IndexScores
    select_entries: SelectEntries
    candidate_blocks: CandidateBlocks
    sparse_attention: SparseAttention
