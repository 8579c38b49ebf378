"""The numbers of a DeepSeek-V4.1 checkpoint and what each layer does (spec §1).

Everything later is derived from this one object; no size is written elsewhere. parse.py builds and checks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class RopeConfig:
    """One rotary table. original_seq_len 0 means no YaRN (spec §5)."""

    base: float
    dim: int
    original_seq_len: int
    factor: float
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class EngramConfig:
    """N-gram memory (spec §13)."""

    layers: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    """Table rows per Engram layer: the sum of its primes."""
    max_ngram: int
    heads: int
    head_dim: int
    vocab_size: int
    """Primes are searched from here on."""
    compressed_vocab_size: int
    pad_token_id: int

    @property
    def width(self) -> int:
        """Channels of one position's gathered rows."""
        return (self.max_ngram - 1) * self.heads * self.head_dim


@dataclass(frozen=True)
class DraftConfig:
    """Draft layers (spec §15)."""

    layers: int
    block_size: int
    noise_token_id: int
    target_layers: tuple[int, ...]
    markov_rank: int
    experts: int
    experts_per_token: int


@dataclass(frozen=True)
class LayerKind:
    """What one backbone layer does (spec §1.3)."""

    index: int
    ratio: int
    """Compression ratio r; 0 = sliding window only."""
    kv_source: int | None
    """Layer whose compressed pool and index keys this one reads; None when r = 0."""
    index_source: int | None
    """Layer whose selection this one uses."""
    makes_candidates: bool
    searches_candidates: bool
    engram: int | None
    """Ordinal among the Engram layers."""
    is_consumer: bool
    """At or after the first r = 1 layer (spec §1.2)."""

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.index and self.ratio > 0

    @property
    def owns_selection(self) -> bool:
        return self.index_source == self.index and self.ratio > 0


@dataclass(frozen=True)
class V41Config:
    """A validated DeepSeek-V4.1 config. Names follow the flat form where the field has no plainer word."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    num_experts: int
    experts_per_token: int
    route_scale: float
    swiglu_limit: float
    """0 means no clamp."""
    norm_eps: float
    window: int
    compress_ratios: tuple[int, ...]
    """One per backbone layer, then one per draft layer."""
    kv_source_layers: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    index_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rope: RopeConfig
    """Layers with r = 0."""
    compress_rope: RopeConfig
    """Layers with r > 0, for everything in them."""
    engram: EngramConfig | None
    draft: DraftConfig | None
    image_token_id: int | None
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    max_positions: int

    @cached_property
    def first_consumer(self) -> int:
        """Index of the first layer with r = 1 (``n_prefill_layer``); num_layers when there is none."""
        return next((i for i in range(self.num_layers) if self.compress_ratios[i] == 1), self.num_layers)

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """Kinds of the backbone layers, in order."""
        return tuple(self._kind(i) for i in range(self.num_layers))

    @property
    def draft_layers(self) -> int:
        return self.draft.layers if self.draft else 0

    @property
    def draft_targets(self) -> tuple[int, ...]:
        return self.draft.target_layers if self.draft else ()

    @property
    def lookback_tokens(self) -> int:
        """Ids before a chunk that Engram reads."""
        return self.engram.max_ngram - 1 if self.engram else 0

    @property
    def supports_replay(self) -> bool:
        """Bounded replay skips consumer rows, so no kv source may lie beyond the first consumer (spec §18.2)."""
        return all(s <= self.first_consumer for s in self.kv_source_layers)

    def rope_of(self, layer: int) -> RopeConfig:
        return self.compress_rope if self.compress_ratios[layer] > 0 else self.rope

    def _kind(self, i: int) -> LayerKind:
        ratio = self.compress_ratios[i]
        compressed = ratio > 0
        index_source = _source(self.index_source_layers, i) if compressed else None
        candidate = self.candidate_source_layer
        return LayerKind(
            index=i,
            ratio=ratio,
            kv_source=_source(self.kv_source_layers, i) if compressed else None,
            index_source=index_source,
            makes_candidates=candidate == i,
            searches_candidates=candidate is not None and index_source == i and i > candidate,
            engram=self.engram.layers.index(i) if self.engram and i in self.engram.layers else None,
            is_consumer=i >= self.first_consumer,
        )


def _source(sources: tuple[int, ...], layer: int) -> int | None:
    """The largest source ≤ layer (spec §1.2)."""
    return max((s for s in sources if s <= layer), default=None)
